"""Parameters of a module that nobody averages, because they were frozen or did not exist when it was wrapped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..checks.models import on_accumulated

_SHOWN = 5  # names in an error


class OtherParameters:
    """The parameters of a module that are not averaged.

    They are looked for when the module gets a parameter or a module, of which torch tells. In all other steps only
    those that were found are looked at, mostly frozen ones.

    Args:
        module: the module, which is not kept.
        averaged: its parameters that are averaged.
        ignored: names of parameters that are not to be averaged.
    """

    def __init__(
        self, module: torch.nn.Module, averaged: Iterable[torch.nn.Parameter], ignored: Collection[str]
    ) -> None:
        self._module, self._averaged, self._ignored = weakref.ref(module), set(map(id, averaged)), set(ignored)
        self._look()
        weak = weakref.ref(self)

        def registered(owner: torch.nn.Module, *_: Any) -> None:
            others = weak()
            if others is not None and id(owner) in others._modules:
                others._has_changed = True

        hooks = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        self._handles = [register(registered) for register in hooks]
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

    def _look(self) -> None:
        module = self._module()
        self._has_changed = False
        self._modules = set() if module is None else set(map(id, module.modules()))
        self._others = [] if module is None else list(self._found(module))

    def _found(self, module: torch.nn.Module) -> Iterable[tuple[str, weakref.ref[torch.nn.Parameter]]]:
        for name, parameter in module.named_parameters():
            if id(parameter) not in self._averaged and name not in self._ignored:
                yield name, weakref.ref(parameter)

    def with_gradients(self) -> list[str]:
        """The names of those that need a gradient and have one."""
        if self._has_changed:
            self._look()
        if not self._others:
            return []
        others = ((name, reference()) for name, reference in self._others)
        return [name for name, each in others if each is not None and each.requires_grad and each.grad is not None]

    def remove(self) -> None:
        """End the watch."""
        for handle in self._handles:
            handle.remove()


def listed(names: Sequence[str]) -> str:
    """The names, or the first of many, for an error."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def names_in(ddp_model: DistributedDataParallel | None, parameters: Iterable[torch.Tensor]) -> list[str]:
    """The names of parameters in a wrapped module; the shapes of those that are not there any more."""
    module = None if ddp_model is None else ddp_model.module
    names = {} if module is None else {id(each): name for name, each in module.named_parameters()}
    return [names.get(id(each), f"one of shape {tuple(each.shape)}") for each in parameters]


class UsedParameters:
    """The parameters that have had a gradient on this rank since the last average, even if it was only accumulated.

    Args:
        parameters: the parameters to watch.

    Attributes:
        ids: the ids of the used ones so far.
        handles: handles of the hooks, which end the watch when they are removed.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.ids: set[int] = set()
        self.handles: list[RemovableHandle] = [on_accumulated(each, _adding(self.ids)) for each in parameters]


def _adding(ids: set[int]) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter, which refers to none."""
    return lambda parameter: ids.add(id(parameter))
