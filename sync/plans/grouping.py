"""Grouping: which units of a bucket travel together, in which messages, and on which channel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from gckernels.compressor import Compressor

from ..programs.layouts import Capabilities
from ..programs.named import ALLREDUCE, POWERSGD
from ..programs.stages import MessageKind, StageSpec, stages_of
from ..programs.steps import AllReduce, Program
from ..programs.topology import Topology
from .plan import UnitPlan


@dataclass(frozen=True)
class PlacedUnit:
    """A unit in a bucket.

    Attributes:
        plan: how it is synchronised.
        start: the element of the bucket, in real numbers, with which it begins.
    """

    plan: UnitPlan
    start: int

    @property
    def stop(self) -> int:
        """The element of the bucket behind it."""
        return self.start + self.plan.numel


@dataclass(frozen=True)
class MessageSpec:
    """Units of a bucket that travel together.

    Attributes:
        kind: how they are sent.
        program: of all of them.
        units: in order.
        channel: of the communicators of its phases.
        start, stop: if they are averaged in place: the stretch of the bucket.
    """

    kind: MessageKind
    program: Program
    units: tuple[PlacedUnit, ...]
    channel: int = 0
    start: int = 0
    stop: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the units."""
        return tuple(unit.plan.key for unit in self.units)

    def stages(self, topology: Topology, apart: bool = False, keep_unused: bool = False) -> tuple[StageSpec, ...]:
        """The stages of the message (see :func:`~gckernels.sync.programs.stages.stages_of`)."""
        capabilities = Capabilities.of(self.units[0].plan.compressor)
        return stages_of(self.kind, self.program, capabilities, topology, apart, keep_unused)


def message_kind(units: Sequence[UnitPlan]) -> MessageKind:
    """How units with one program are sent together: as factors if one of them is, for which all are added in fp32."""
    program = units[0].program
    if units[0].in_place:
        return MessageKind.IN_PLACE
    if program == POWERSGD or any(not isinstance(unit.compressor, Compressor) for unit in units):
        return MessageKind.LOW_RANK
    return MessageKind.ENCODED


def group_units(units: Sequence[PlacedUnit], channels: int = 1) -> tuple[MessageSpec, ...]:
    """The messages of a bucket, in the order in which they are submitted.

    Neighbours that are averaged in place are one message. Of all other units those of one program, root and, where
    payloads are added, payload dtype are one. A part of a parameter is a message by itself, so that the parts of a
    parameter are sent at the same time.

    Args:
        units: all units of the bucket.
        channels: of the plan; messages that are not averaged in place take turns.
    """
    groups: dict[Hashable, list[PlacedUnit]] = {}
    for unit in units:
        if not unit.plan.in_place:
            groups.setdefault(_companions(unit.plan), []).append(unit)
    messages = list(_stretches(units))
    for number, group in enumerate(groups.values()):
        plans = [unit.plan for unit in group]
        kind = message_kind(plans)
        # the factors of low-rank methods have one channel
        channel = number % channels if kind == MessageKind.ENCODED else 0
        messages.append(MessageSpec(kind, plans[0].program, tuple(group), channel))
    return tuple(messages)


def whole_bucket(units: Sequence[PlacedUnit], numel: int) -> MessageSpec:
    """The message of a bucket of ``numel`` elements that is averaged in place."""
    return MessageSpec(MessageKind.IN_PLACE, ALLREDUCE, tuple(units), 0, 0, numel)


def _companions(unit: UnitPlan) -> Hashable:
    """Equal for units that travel together."""
    is_reduced = any(isinstance(step, AllReduce) for step in unit.program)
    dtype = unit.compressor.traits.payload_dtype if is_reduced else None
    return unit.program, unit.root, dtype, None if unit.start is None else unit.key


def _stretches(units: Sequence[PlacedUnit]) -> list[MessageSpec]:
    """The stretches of a bucket that are averaged in place."""
    stretches: list[list[PlacedUnit]] = []
    for unit in sorted((unit for unit in units if unit.plan.in_place and unit.plan.numel), key=lambda each: each.start):
        if stretches and stretches[-1][-1].stop == unit.start:
            stretches[-1].append(unit)
        else:
            stretches.append([unit])
    return [
        MessageSpec(MessageKind.IN_PLACE, ALLREDUCE, tuple(stretch), 0, stretch[0].start, stretch[-1].stop)
        for stretch in stretches
    ]
