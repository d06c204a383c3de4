"""Which parameters are synchronised, and by what: none may be by two at once, and nothing lives longer than its model.

Nothing here holds a parameter or a module, and nothing is written into them: copies of a model are free, and a model
is pickled as it was.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from .models import ddp_parameters

_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
attached: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""The models that have an attachment, or had one."""


class Claim:
    """The parameters of one attachment or synchronizer. They are its own until :meth:`release`, or until nothing holds
    the claim any more."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        _claims.add(self)

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter is one of them."""
        known = self._parameters.get(id(parameter))
        return known is not None and known() is parameter

    def release(self) -> None:
        """Let others have them; further calls do nothing."""
        _claims.discard(self)


def refuse_claimed(what: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError that names a parameter if an attachment or a synchronizer has one."""
    name = _confirmed(lambda: (name for name, each in parameters.items() if any(claim.has(each) for claim in _claims)))
    if name is not None:
        raise ValueError(
            f"{what}: parameter {name} is synchronised by another attachment or Synchronizer; close() that first"
        )


def refuse_wrapped(what: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError that names a parameter if a DistributedDataParallel model, without an attachment, averages
    it."""

    def wrapped() -> Iterator[str]:
        names = {id(parameter): name for name, parameter in parameters.items()}
        for ddp_model in _ddp_models():
            yield from (names[id(each)] for each in ddp_parameters(ddp_model).values() if id(each) in names)

    name = _confirmed(wrapped)
    if name is not None:
        raise ValueError(
            f"{what}: parameter {name} is averaged by a DistributedDataParallel model, too; use attach() with it"
        )


def _confirmed(find: Callable[[], Iterator[str]]) -> str | None:
    """The first name that is found, also after everything that nobody can reach has been freed; ``None`` if there is
    none."""
    if next(find(), None) is None:
        return None
    gc.collect()
    return next(find(), None)


def _ddp_models() -> list[DistributedDataParallel]:
    """All DDP models of this process that are without an attachment. DDP keeps no list, and a wrapped module does not
    know of its wrapper, so the collector is asked."""
    # type() and not isinstance(), which asks objects for their __class__; and one in construction has no reducer yet
    every = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in every if hasattr(each, "reducer") and each not in attached]


def keep_alive(modules: Iterable[torch.nn.Module], end: Callable[[], object]) -> Callable[[], None]:
    """Hold ``end``, and what it is a method of, until the last of the modules is gone, and call it then. Nothing is
    called when the interpreter exits.

    Returns:
        A function that lets go of ``end`` before that, without calling it.
    """
    left: set[int] = set()

    def gone(index: int) -> None:
        left.discard(index)
        if not left:
            end()

    finalizers = [weakref.finalize(module, gone, index) for index, module in enumerate(modules)]
    left.update(range(len(finalizers)))
    for finalizer in finalizers:
        finalizer.atexit = False  # a lane may be waiting for a rank that is gone

    def let_go() -> None:
        for finalizer in finalizers:
            finalizer.detach()

    return let_go
