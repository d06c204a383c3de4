"""Claims on parameters: each is synchronised in one place at a time, and nothing outlives the model.

This module keeps no parameter or module alive, and writes nothing into them. Copies of a model can be synchronised
separately, and a model is pickled as it was.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..plans.arguments import differentiable
from .checks.models import ddp_parameters

_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
attached: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""The models that have an attachment, or had one."""
recorded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""The models that are being traced, by :func:`~gckernels.sync.trace_model`."""


class Holder(Protocol):
    """A front end, which holds a claim for its attachment."""

    @property
    def is_spent(self) -> bool:
        """Whether another one may take its place, because it cannot go on."""

    def end(self) -> None:
        """Close the attachment, which releases the claim."""


class Claim:
    """The exclusive claim of one attachment on its parameters, until :meth:`release` or until the claim
    is garbage.

    Args:
        parameters: the parameters.
        holder: the front end, which the claim does not keep alive.
        modules: the modules that have the parameters, where these may be replaced.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], holder: Holder, modules: Iterable[torch.nn.Module] = ()
    ) -> None:
        self._covered = {id(each): weakref.ref(each) for each in (*parameters, *modules)}
        self._holder = weakref.ref(holder)
        _claims.add(self)

    @property
    def is_spent(self) -> bool:
        """Whether others may claim the parameters, after :func:`end_spent`."""
        holder = self._holder()
        return holder is None or holder.is_spent

    def end(self) -> None:
        """Close the attachment."""
        if (holder := self._holder()) is not None:
            holder.end()

    def has(self, thing: torch.nn.Parameter | torch.nn.Module) -> bool:
        """Whether the claim covers a parameter or a module."""
        known = self._covered.get(id(thing))
        return known is not None and known() is thing

    def release(self) -> None:
        """Let others claim the parameters. Further calls do nothing."""
        _claims.discard(self)


def averaged_parameters(ddp_model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that a DDP model averages, by their plain names in the wrapped module.

    They are those of its attachment, which may have been frozen since, without others thawed since; or else all that
    are not frozen.
    """
    ignored, named = ddp_model.parameters_to_ignore, ddp_model.module.named_parameters()
    for claim in list(_claims):
        if claim.has(ddp_model):
            return differentiable((name, each) for name, each in named if name not in ignored and claim.has(each))
    return ddp_parameters(ddp_model)


def refuse_claimed(caller: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError that names a parameter if an attachment has claimed it, and is not spent."""

    def claimed() -> Iterator[str]:
        for claim in list(_claims):
            names = [name for name, parameter in parameters.items() if claim.has(parameter)]
            if names and not claim.is_spent:
                yield names[0]

    name = _confirmed(claimed)
    if name is not None:
        raise ValueError(f"{caller}: parameter {name} is synchronised by another attachment; close() that first")


def end_spent(model: torch.nn.Module) -> None:
    """Close the attachments of a model and its parts that are spent. Nobody else may have kept them.
    Every rank calls it."""
    things: list[torch.nn.Parameter | torch.nn.Module] = [*model.parameters(), *model.modules()]
    for claim in list(_claims):
        if any(claim.has(thing) for thing in things) and claim.is_spent:
            claim.end()


def refuse_wrapped(
    caller: str,
    parameters: Mapping[str, torch.nn.Parameter],
    advice: str = "attach to that model",
    over: Collection[int] = (),
    but: DistributedDataParallel | None = None,
) -> None:
    """Raise a ValueError that names a parameter if a DDP model without an attachment averages it.

    Args:
        caller: the function that was called, for errors.
        parameters: the parameters, by name.
        advice: the end of the message.
        over: ranks of the job. Only a DDP model over all of these is refused.
        but: a DDP model that is not refused.
    """

    def wrapped() -> Iterator[str]:
        names = {id(parameter): name for name, parameter in parameters.items()}
        for ddp_model in _ddp_models():
            if ddp_model is but:
                continue
            found = [names[id(each)] for each in ddp_parameters(ddp_model).values() if id(each) in names]
            if found and (not over or set(over) <= set(dist.get_process_group_ranks(ddp_model.process_group))):
                yield found[0]

    name = _confirmed(wrapped)
    if name is not None:
        raise ValueError(f"{caller}: parameter {name} is averaged by a DistributedDataParallel model, too; {advice}")


def _confirmed(find: Callable[[], Iterator[str]]) -> str | None:
    """The first name that ``find`` yields even after garbage has been collected; ``None`` if there is none."""
    if next(find(), None) is None:
        return None
    gc.collect()
    return next(find(), None)


def _ddp_models() -> list[DistributedDataParallel]:
    """All DDP models of this process that have no attachment.

    DDP keeps no list of its models, and a wrapped module does not refer to its wrapper. So the garbage collector is
    asked for what refers to DDP's classes: every object refers to its own.
    """
    classes = _with_subclasses(DistributedDataParallel)
    # type(), as isinstance() reads __class__ of all of them. A model in construction has no reducer yet.
    every = [each for each in gc.get_referrers(*classes) if type(each) in classes]
    return [each for each in every if hasattr(each, "reducer") and each not in attached]


def _with_subclasses(cls: type) -> set[type]:
    """The class and all classes that inherit from it."""
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def keep_alive(modules: Iterable[torch.nn.Module], end: Callable[[], object]) -> Callable[[], None]:
    """Keep ``end``, and the object that it is a method of, until the last of the modules is gone; then call it. It is
    not called when the interpreter exits.

    Returns:
        A function that releases ``end`` earlier, without calling it.
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
