"""The parameters that a model has, compared in every step with those that its attachment knows."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..plans.arguments import plain_name
from ..plans.strides import grad_strides

_NO_ID = 0


def left_out(model: torch.nn.Module, exclude: Iterable[str] = ()) -> frozenset[str]:
    """The plain names of the parameters and buffers of a model that each rank has alone: those that
    DistributedDataParallel ignores (``_set_params_and_buffers_to_ignore_for_model``), and others. A parameter with
    several names is left out only with all of them.

    Args:
        model: the model.
        exclude: the names of the others.
    """
    given = {plain_name(name) for name in (*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *exclude)}
    if not given:
        return frozenset()
    parameters, buffers = (each(remove_duplicate=False) for each in (model.named_parameters, model.named_buffers))
    named = [(plain_name(name), id(each)) for name, each in (*parameters, *buffers)]
    kept = {key for name, key in named if name not in given}
    return frozenset(name for name, key in named if key not in kept)


def own_names(model: torch.nn.Module, left_out: Collection[str]) -> set[str]:
    """The full names of the parameters and buffers of a model that are left out, given their plain names."""
    named = (*model.named_parameters(), *model.named_buffers()) if left_out else ()
    return {name for name, _ in named if plain_name(name) in left_out}


def refuse_unknown(caller: str, model: torch.nn.Module, exclude: Any) -> None:
    """Raise unless an argument ``exclude`` has names of parameters or buffers of a model.

    Raises:
        TypeError, ValueError: it has anything else.
    """
    if not isinstance(exclude, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in exclude):
        raise TypeError(f"{caller}: exclude must be a list of names of parameters and buffers, got {exclude!r:.80}")
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    if unknown := {plain_name(name) for name in exclude} - {plain_name(name) for name, _ in named}:
        raise ValueError(f"{caller}: exclude must have names of parameters and buffers, got {listed(unknown)}")


class Members:
    """The parameters of a model at the time when it was attached. It keeps neither them nor the model.

    Args:
        model: the model. When it is gone, the modules in which the parameters were registered count in its place. It
            may be a list of modules that nobody keeps.
        parameters: the parameters, by their plain names.
        left_out: the plain names of those that each rank has alone.

    Attributes:
        references: the parameters, by name.
        forms: tensors without memory that have the shape and the dtype of each parameter, and strides of its gradient.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        left_out: Collection[str] = (),
    ) -> None:
        whole = getattr(model, "_orig_mod", model)
        named = model.named_parameters(remove_duplicate=False) if left_out else ()
        self._left_out = {id(each): weakref.ref(each) for name, each in named if plain_name(name) in left_out}
        self._model: weakref.ref[torch.nn.Module] = weakref.ref(whole)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        owners = (each for each in whole.modules() if not self._names.keys().isdisjoint(map(id, _own(each))))
        self._owners: list[weakref.ref[torch.nn.Module]] = [weakref.ref(module) for module in owners]
        self._seen = seen = [_NO_ID]  # ids of what was trained in the last step
        self._trained = frozenset[str]()

        def forget(reference: object) -> None:
            seen.append(_NO_ID)  # another parameter may get the id

        self.references = {name: weakref.ref(parameter, forget) for name, parameter in parameters.items()}
        self.forms = {name: _form(parameter) for name, parameter in parameters.items()}
        self._device = next(iter(parameters.values())).device

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The model, and the modules in which the parameters were registered, as far as they still exist."""
        references = (self._model, *self._owners)
        return [module for reference in references if (module := reference()) is not None]

    def existing(self) -> dict[str, torch.nn.Parameter]:
        """The known parameters that somebody still has, by name."""
        return {name: each for name, reference in self.references.items() if (each := reference()) is not None}

    def registered(self) -> dict[str, torch.nn.Parameter]:
        """The known parameters that the model still has, by name."""
        existing = self.existing()
        if self._model() is None:
            return existing
        found = set(map(id, self._now()))
        return {name: each for name, each in existing.items() if id(each) in found}

    def trained(self) -> frozenset[str]:
        """The names of the known parameters that are not frozen and that the model still has; the same object as long
        as these are the same.

        Raises:
            RuntimeError: the model has others that are not frozen.
        """
        found = [id(parameter) for parameter in self._now() if parameter is not None and parameter.requires_grad]
        if found != self._seen:
            if unknown := self._unknown():
                raise self._error(unknown)
            trained = {name for name, parameter in self.registered().items() if parameter.requires_grad}
            if self._model() is None:  # ranks free parameters at different times, and must agree
                trained.update(name for name in self._trained if self.references[name]() is None)
            self._trained, self._seen[:] = frozenset(trained), found
        return self._trained

    def look_before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look for gradients that an optimizer would use although nobody has averaged them. Where only parameters that
        are not known have been trained, no backward was seen.

        Raises:
            RuntimeError: there are such gradients.
        """
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        local = {id(parameter) for parameter in stepped if parameter.grad is not None and not self._knows(parameter)}
        used = [parameter for parameter in self._unknown() if id(parameter) in local] if local else []
        if used:
            raise self._error(used)

    def names_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The names of those parameters that are known."""
        return [self._names[id(each)] for each in parameters if self._knows(each)]

    def unknown_with_gradients(self, ignored: Collection[str]) -> list[str]:
        """The names of parameters of the model that are not frozen, were not there, and have a gradient.

        Args:
            ignored: names of parameters that are left out.
        """
        names, references = self._names, self.references
        found = set()
        for each in self._now():  # in one function, because plain steps have no other work
            if each is not None and each.requires_grad and each.grad is not None:
                name = names.get(id(each))
                if name is None or references[name]() is not each:
                    found.add(id(each))
        if not found:
            return []
        named = (pair for root in self._roots() for pair in root.named_parameters())
        return [name for name, each in named if id(each) in found and name not in ignored]

    @property
    def have_changed(self) -> bool:
        """Whether other parameters are trained, or a parameter has been converted or moved."""
        now, forms = self.registered(), self.forms
        return bool(self._unknown()) or any(
            (each.dtype, each.shape, each.device) != (forms[name].dtype, forms[name].shape, self._device)
            for name, each in now.items()
        )

    # ---------------------------------------------------------------- the model as it is now

    def _roots(self) -> list[torch.nn.Module]:
        model = self._model()
        return self.modules if model is None else [model]

    def _now(self) -> list[torch.nn.Parameter | None]:
        """All parameters that the model has, and ``None`` where a module has left one out.

        ``Module.parameters`` would take three times as long.
        """
        model = self._model()
        stack: list[torch.nn.Module | None] = [model] if model is not None else [*self.modules]
        found: list[torch.nn.Parameter | None] = []
        seen: set[int] = set()
        while stack:
            module = stack.pop()
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                found += module._parameters.values()
                stack += module._modules.values()
        return found

    def _unknown(self) -> list[torch.nn.Parameter]:
        """The parameters of the model that are not frozen, and were not there."""
        trained = [each for each in self._now() if each is not None and each.requires_grad]
        return [each for each in trained if not self._knows(each) and not self._leaves_out(each)]

    def _knows(self, parameter: torch.Tensor) -> bool:
        name = self._names.get(id(parameter))
        return name is not None and self.references[name]() is parameter

    def _leaves_out(self, parameter: torch.Tensor) -> bool:
        reference = self._left_out.get(id(parameter))
        return reference is not None and reference() is parameter

    def _error(self, unknown: Iterable[torch.nn.Parameter]) -> RuntimeError:
        names = {
            id(parameter): plain_name(name)
            for module in self._roots()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        gone = self.references.keys() - self.registered().keys()
        lost = f", and has lost {listed(gone)}" if gone else ""
        return RuntimeError(
            f"gckernels: the model has got parameters since it was attached, whose gradients nobody "
            f"averages: {listed(names[id(parameter)] for parameter in unknown)}{lost}; attach to it again, "
            "for the model as it is now"
        )


def _own(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    return module.parameters(recurse=False)


def _form(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the shape and the dtype of a parameter, and strides of its gradient."""
    strides = grad_strides(parameter.detach())
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")


def listed(names: Iterable[str]) -> str:
    """The first of the names, for a message."""
    found = sorted(set(names))
    return ", ".join(found[:10]) + (", ..." if len(found) > 10 else "")
