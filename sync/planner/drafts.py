"""Drafts: launches, the messages in them and the options of these messages, from which plans are made.

Policies and searches change drafts, which name tensors by their numbers; :func:`plan_of` writes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gckernels.compressor import Compressor, chunk_numel
from gckernels.method import Method

from ..plans.plan import Attached, Plan, UnitPlan
from ..programs.named import ALLREDUCE
from ..programs.steps import Program
from .problem import Problem


@dataclass(frozen=True)
class Option:
    """How the tensors of a message are synchronised.

    Attributes:
        program: the program; by default the message is averaged in place.
        compressor: for the tensors that may use it, not fitted to shapes; ``None`` if all are sent exactly.
        parts: the number of messages into which large tensors are cut, so that their stages overlap.
        channel: the channel of the first part. Each further one takes the next channel.
        root: the rank that is the root of programs that have one.
    """

    program: Program = ALLREDUCE
    compressor: Method | None = None
    parts: int = 1
    channel: int = 0
    root: int = 0

    @property
    def in_place(self) -> bool:
        """Whether the message is averaged where it lies."""
        return self.program == ALLREDUCE


@dataclass(frozen=True)
class MessageDraft:
    """Tensors that are sent together.

    Attributes:
        tensors: their numbers, in order.
        option: how they are sent.
    """

    tensors: tuple[int, ...]
    option: Option = Option()


LaunchDraft: TypeAlias = tuple[MessageDraft, ...]
"""Messages that are submitted together, when the last of their tensors is ready."""
Draft: TypeAlias = tuple[LaunchDraft, ...]
"""All launches, first launched first. Each tensor is in one message."""

MAX_CHANNELS = 2
"""Channels that policies use. More only share the same links."""
USUAL_NBYTES = 25 << 20
"""The size of a launch of the synchronizer, and of DDP's buckets, by default."""
MIN_PART_NUMEL = 4096
"""Tensors of which parts would have fewer elements stay whole."""


def draft_of_launches(launches: Sequence[Sequence[int]], option: Option) -> Draft:
    """The draft that sends every launch as one message with the same option."""
    return tuple((MessageDraft(tuple(launch), option),) for launch in launches)


def usual_launches(problem: Problem, max_nbytes: int = USUAL_NBYTES) -> tuple[tuple[int, ...], ...]:
    """The launches without a reason for others: DDP's buckets; for a synchronizer, neighbours of at most ``max_nbytes``
    bytes together."""
    if problem.buckets:
        return problem.buckets
    launches: list[list[int]] = []
    nbytes = 0
    for number, tensor in enumerate(problem.trace.tensors):
        size = tensor.numel * tensor.dtype.itemsize
        fits = nbytes + size <= max_nbytes and tensor.dtype == problem.dtype(launches[-1][-1]) if launches else False
        if fits:
            launches[-1].append(number)
        else:
            launches.append([number])
            nbytes = 0
        nbytes += size
    return tuple(map(tuple, launches))


def plan_of(problem: Problem, draft: Draft) -> Plan:
    """The plan of a draft.

    A tensor that may not use the compressor of its message travels in the same message, with
    :class:`~gckernels.Identity`. A tensor that no program with encodings takes is averaged in place.

    Raises:
        ValueError: the draft has not each tensor once, or not the launches of the problem's buckets.
    """
    _check(problem, draft)
    ddp, channels = problem.attached == Attached.DDP, 1
    units: list[UnitPlan] = []
    for number, launch in enumerate(draft):
        parts_before = 0
        for message in launch:
            option = message.option
            channels = max(channels, min(option.channel + option.parts, MAX_CHANNELS))
            for tensor in message.tensors:
                units += _units(problem, tensor, option, None if ddp else number, parts_before)
            parts_before += option.parts
    return _finished(Plan(tuple(reversed(units)), problem.topology, channels), problem.attached)


def cut(numel: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The starts and sizes of the parts of a tensor; a small tensor has fewer parts, or is whole: ``((0, numel),)``."""
    if parts == 1 or numel < parts * MIN_PART_NUMEL:
        return ((0, numel),)
    size = chunk_numel(numel, parts)
    return tuple((start, min(size, numel - start)) for start in range(0, numel, size))


def _units(problem: Problem, tensor: int, option: Option, launch: int | None, message: int) -> list[UnitPlan]:
    """The units of a tensor: one, or its parts."""
    traced, method = problem.trace.tensors[tensor], problem.fitted(tensor, option.compressor)
    program = option.program if problem.encodable(tensor) else ALLREDUCE
    whole = UnitPlan(traced.name, traced.numel, method, program, method.traits.needs_feedback, root=option.root)
    pieces = cut(traced.numel, option.parts) if isinstance(method, Compressor) else ((0, traced.numel),)
    if len(pieces) == 1 or whole.in_place:
        return [_sent(whole, launch, message, option.channel)]
    return [
        _sent(replace(whole, start=start, numel=numel), launch, message + part, option.channel + part)
        for part, (start, numel) in enumerate(pieces)
    ]


def _sent(unit: UnitPlan, launch: int | None, message: int, channel: int) -> UnitPlan:
    """The unit in its launch, message and channel."""
    return unit


def _finished(plan: Plan, attached: Attached) -> Plan:
    """The plan for the way by which it is attached."""
    return plan


def _check(problem: Problem, draft: Draft) -> None:
    held = [[tensor for message in launch for tensor in message.tensors] for launch in draft]
    if sorted(tensor for launch in held for tensor in launch) != list(range(len(problem.trace.tensors))):
        raise ValueError("plan_of: the draft must have each tensor of the trace once")
    if problem.buckets and [sorted(launch) for launch in held] != [sorted(bucket) for bucket in problem.buckets]:
        raise ValueError("plan_of: with DDP the launches of a draft must be the buckets of the trace, in order")
