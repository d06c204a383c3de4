"""Grouping of the units of a bucket into messages, and assignment of the messages to channels."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from gckernels.codec import Codec

from ..programs.layouts import Capabilities
from ..programs.named import ALLREDUCE, POWERSGD
from ..programs.stages import MessageKind, StageSpec, stages_of
from ..programs.steps import AllReduce, Program
from ..programs.topology import Topology
from .plan import UnitPlan


@dataclass(frozen=True)
class PlacedUnit:
    """A unit at its position in a bucket."""

    plan: UnitPlan
    start: int  # the index of its first element in the bucket, in real numbers
    row: int | None = None
    """If the bucket has a row for the shards of each rank, the elements of the unit in a full row, which begin at
    ``start``; otherwise ``None``."""

    @property
    def stop(self) -> int:
        """The index in the bucket of the element behind its last one."""
        return self.start + self.plan.numel


@dataclass(frozen=True)
class MessageSpec:
    """A message: units of a bucket that are sent together."""

    kind: MessageKind
    program: Program  # the program of all its units
    units: tuple[PlacedUnit, ...]  # the units in the order of the message
    channel: int = 0  # the channel of the communicators on which its collectives run
    start: int = 0  # start, stop: the elements of the bucket that the message averages, if it averages in place
    stop: int = 0

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """The names of its units. They are kept, because searches predict steps with the same message very often."""
        return tuple(unit.plan.key for unit in self.units)

    def stages(self, topology: Topology, apart: bool = False) -> tuple[StageSpec, ...]:
        """The stages of the message (see :func:`~gckernels.sync.programs.stages.stages_of`)."""
        capabilities = Capabilities.of(self.units[0].plan.compressor)
        return stages_of(self.kind, self.program, capabilities, topology, apart)


def message_kind(units: Sequence[UnitPlan]) -> MessageKind:
    """The kind of a message with these units, which have the same program.

    If one unit is sent as low-rank factors, all units share that message, which is summed in fp32.
    """
    program = units[0].program
    if units[0].in_place:
        return MessageKind.IN_PLACE
    methods = {type(unit.compressor) for unit in units}
    if program == POWERSGD or not all(issubclass(method, Codec) for method in methods):
        return MessageKind.LOW_RANK
    return MessageKind.ENCODED


def group_units(units: Sequence[PlacedUnit], channels: int = 1) -> tuple[MessageSpec, ...]:
    """The messages of a bucket, in the order in which they are submitted.

    Neighbouring units that are averaged in place become one message if the plan gives them the same message, or none.
    All other units share a message if they have the same program, the same root and, if payloads are summed, the same
    payload dtype, and the plan gives them the same message and channel. If it gives them none, a part of a parameter is
    a message by itself, so that the parts of a parameter are sent at the same time.

    Args:
        units: all units of the bucket.
        channels: the number of channels of the plan. Encoded messages to which it gives none take them in turn.
    """
    groups: dict[Hashable, list[PlacedUnit]] = {}
    programs = {id(unit.plan.program): unit.plan.program for unit in units}  # units share few, which are slow to hash
    first: dict[Program, int] = {}
    same = {each: (first.setdefault(program, each), _is_reduced(program)) for each, program in programs.items()}
    for unit in units:
        if not unit.plan.in_place:
            groups.setdefault(_companions(unit.plan, *same[id(unit.plan.program)]), []).append(unit)
    messages = list(_stretches(units))
    for number, group in enumerate(groups.values()):
        plans = [unit.plan for unit in group]
        kind = message_kind(plans)
        channel = number % channels if plans[0].channel is None else plans[0].channel
        if kind != MessageKind.ENCODED:
            channel = 0  # messages of low-rank factors have one channel
        messages.append(MessageSpec(kind, plans[0].program, tuple(group), channel))
    return tuple(messages)


def whole_bucket(units: Sequence[PlacedUnit], numel: int) -> MessageSpec:
    """The message of a bucket of ``numel`` elements that is averaged in place."""
    return MessageSpec(MessageKind.IN_PLACE, ALLREDUCE, tuple(units), 0, 0, numel)


def _is_reduced(program: Program) -> bool:
    """Whether payloads of the program are summed."""
    return any(isinstance(step, AllReduce) for step in program)


def _companions(unit: UnitPlan, program: int, is_reduced: bool) -> Hashable:
    """A key that is equal for units of the same message.

    Args:
        program: a number of its program, which equal programs have alone.
        is_reduced: whether the payloads of that program are summed.
    """
    dtype = unit.compressor.traits.payload_dtype if is_reduced else None
    part = unit.key if unit.start is not None and unit.message is None else None
    return program, unit.root, dtype, unit.message, unit.channel, part


def _stretches(units: Sequence[PlacedUnit]) -> list[MessageSpec]:
    """A message for each contiguous stretch of a bucket that is averaged in place, and has one message in the plan."""
    stretches: list[list[PlacedUnit]] = []
    for unit in sorted((unit for unit in units if unit.plan.in_place and unit.plan.numel), key=lambda each: each.start):
        before = stretches[-1][-1] if stretches else None
        if before is not None and before.stop == unit.start and before.plan.message == unit.plan.message:
            stretches[-1].append(unit)
        else:
            stretches.append([unit])
    return [
        MessageSpec(MessageKind.IN_PLACE, ALLREDUCE, tuple(stretch), 0, stretch[0].start, stretch[-1].stop)
        for stretch in stretches
    ]
