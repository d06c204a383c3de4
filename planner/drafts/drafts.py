"""Drafts: launches, the messages in them and the options of these messages, from which plans are made.

Policies and searches change drafts, which name tensors by their numbers; :func:`plan_of` writes the plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gckernels.codec import Codec, chunk_numel
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.plans.buckets import BUCKET_NBYTES, UPDATE_BUCKET_NBYTES
from gckernels.sync.plans.grouping import MessageSpec, group_units
from gckernels.sync.plans.plan import Plan, UnitPlan
from gckernels.sync.programs.named import ALLREDUCE, exact_program
from gckernels.sync.programs.stages import MessageKind
from gckernels.sync.programs.steps import Broadcast, Program
from gckernels.sync.programs.topology import Topology, balanced

from ..machines.machine import MachineError
from ..timeline.launches import BucketLaunch, launches_of
from .problem import Problem


@dataclass(frozen=True)
class Option:
    """How the tensors of a message are synchronised."""

    program: Program = ALLREDUCE  # the program; by default the message is averaged in place
    compressor: Compressor | None = None
    """For the tensors that may use it, not fitted to shapes; ``None`` if all are sent exactly."""
    parts: int = 1  # the number of messages into which large tensors are cut, so that their stages overlap
    channel: int = 0  # the channel of the first part. Each further one takes the next channel.
    root: int | None = None
    """The rank that is the root of programs that have one; ``None`` to spread the roots over the ranks."""

    @property
    def in_place(self) -> bool:
        """Whether the message is averaged where it lies."""
        return self.program == ALLREDUCE

    @property
    def has_channels(self) -> bool:
        """Whether messages with the option have channels, which low-rank factors have not."""
        return self.compressor is None or isinstance(self.compressor, Codec)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # kept, because searches look options up all the time
        return hash((self.program, self.compressor, self.parts, self.channel, self.root))


@dataclass(frozen=True)
class MessageDraft:
    """Tensors that are sent together."""

    tensors: tuple[int, ...]  # their numbers, in order
    option: Option = Option()  # how they are sent


LaunchDraft: TypeAlias = tuple[MessageDraft, ...]
"""Messages that are submitted together, when the last of their tensors is ready."""
Draft: TypeAlias = tuple[LaunchDraft, ...]
"""All launches, first launched first. Each tensor is in one message."""

MAX_CHANNELS = 2
"""Channels that policies use. More only share the same links."""
MIN_PART_NUMEL = 4096
"""Tensors of which parts would have fewer elements stay whole."""


Launches: TypeAlias = tuple[tuple[int, ...], ...]
"""The tensors of each launch."""
SMALL_NUMEL = 1 << 14
"""A tensor that may not be compressed travels raw beside the payloads of its launch if it has no more elements."""


def carried(problem: Problem, tensors: Sequence[int], option: Option) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors that a message with the option has, and those that are averaged in place beside it.

    Small tensors that may not be compressed are in the message, unless it would have nothing else.
    """
    if option.compressor is None:
        return tuple(tensors), ()
    users, traced = problem.users.get(option.compressor, frozenset()), problem.trace.tensors
    if users.isdisjoint(tensors):
        return (), tuple(tensors)
    kept = [each in users or (traced[each].numel <= SMALL_NUMEL and problem.encodable(each)) for each in tensors]
    return (
        tuple(tensor for tensor, keep in zip(tensors, kept, strict=True) if keep),
        tuple(tensor for tensor, keep in zip(tensors, kept, strict=True) if not keep),
    )


def draft_of_launches(launches: Sequence[Sequence[int]], option: Option) -> Draft:
    """The draft that sends every launch as one message with the same option."""
    return tuple((MessageDraft(tuple(launch), option),) for launch in launches)


def usual_launches(problem: Problem, max_nbytes: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The launches without a reason for others: the buckets of DDP or FSDP2; for a bare module, neighbours of at most
    ``max_nbytes`` bytes together, by default those of a bucket."""
    if problem.buckets:
        return problem.buckets
    if max_nbytes is None:
        max_nbytes = BUCKET_NBYTES if problem.rounds is None else UPDATE_BUCKET_NBYTES
    launches: list[list[int]] = []
    nbytes = 0
    for number, tensor in enumerate(problem.trace.tensors):
        joins = bool(launches) and tensor.dtype == problem.dtype(launches[-1][-1])
        if joins and nbytes + tensor.nbytes <= max_nbytes:
            launches[-1].append(number)
        else:
            launches.append([number])
            nbytes = 0
        nbytes += tensor.nbytes
    return tuple(map(tuple, launches))


def plan_of(problem: Problem, draft: Draft) -> Plan:
    """The plan of a draft.

    A tensor that may not use the compressor of its message travels in the same message, with
    :class:`~gckernels.Identity`. A tensor that no program with encodings takes is averaged in place.

    Raises:
        ValueError: the draft has not each tensor once, or not the launches of the problem's buckets.
    """
    _check(problem, draft)
    roots, launches = roots_of(problem, draft), problem.frontend.plans_launches
    units: list[UnitPlan] = []
    channels, number = 1, 0
    for launch, messages in enumerate(draft):
        for message in messages:
            option, root = message.option, roots.get(number, message.option.root or 0)
            for tensor in message.tensors:
                units += units_of(problem, tensor, option, root, launch if launches else None, number)
            if not option.in_place and option.has_channels:
                channels = max(channels, min(option.channel + option.parts, MAX_CHANNELS))
            number += option.parts
    topology = None if problem.frontend.gathers else problem.topology  # its programs are flat
    weights = problem.weights if any(not unit.in_place for unit in units) else None
    return Plan(tuple(reversed(units)), topology, channels, problem.frontend, weights=weights)


def step_s(problem: Problem, draft: Draft) -> float:
    """The predicted seconds of a step with the plan of a draft; infinite if the machine lacks a price. Results are
    kept."""
    known = problem.judged_drafts
    if draft not in known:
        try:
            known[draft] = problem.timeline(plan_of(problem, draft)).step_s
        except MachineError:
            known[draft] = math.inf
    return known[draft]


def cut(numel: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The starts and sizes of the parts of a tensor; a small tensor has fewer parts, or is whole: ``((0, numel),)``."""
    if parts == 1 or numel < parts * MIN_PART_NUMEL:
        return ((0, numel),)
    size = chunk_numel(numel, parts)
    return tuple((start, min(size, numel - start)) for start in range(0, numel, size))


def units_of(
    problem: Problem, tensor: int, option: Option, root: int, launch: int | None, message: int
) -> list[UnitPlan]:
    """The units of a tensor: one, or its parts. Each further part is in the next message, on the next channel."""
    traced, method = problem.trace.tensors[tensor], problem.fitted(tensor, option.compressor)
    name, program, feedback = traced.name, option.program, method.traits.needs_feedback
    if option.in_place or not problem.encodable(tensor):
        exact = exact_program(problem.frontend.span())
        return [UnitPlan(name, traced.numel, method, exact, feedback, launch=launch)]
    if not option.has_channels:
        return [UnitPlan(name, traced.numel, method, program, feedback, None, root, (), launch, message)]
    pieces = ((0, traced.numel),) if problem.is_sharded else cut(traced.numel, option.parts)
    units = []
    for part, (start, numel) in enumerate(pieces):
        at, channel = (start if len(pieces) > 1 else None), (option.channel + part) % MAX_CHANNELS
        units.append(UnitPlan(name, numel, method, program, feedback, at, root, (), launch, message + part, channel))
    return units


def roots_of(problem: Problem, draft: Draft) -> dict[int, int]:
    """The roots of the messages that leave theirs open, by number, spread over the ranks."""
    numels, number = {}, 0
    for message in itertools.chain.from_iterable(draft):
        option = message.option
        if option.root is None and any(isinstance(step, Broadcast) for step in option.program):
            numels[number] = sum(problem.trace.tensors[tensor].numel for tensor in message.tensors)
        number += option.parts
    return spread(numels, problem.topology)


def spread(numels: Mapping[int, int], topology: Topology) -> dict[int, int]:
    """The root of each message: from the largest message to the smallest, the rank that is the root of the fewest
    elements so far. Between equals a rank on another machine and another place than those before comes first.

    Args:
        numels: the elements of each message, by number.
        topology: the topology of the ranks.
    """
    machines, devices = topology.machines, topology.devices
    places = range(min(topology.world_size, len(numels)))
    around = math.lcm(machines, devices)  # places until machine and device are those of the first one together
    order = [place % machines * devices + (place + place // around) % devices for place in places]
    return {message: order[place] for message, place in balanced(numels, len(places)).items()}


def _check(problem: Problem, draft: Draft) -> None:
    held = [[tensor for message in launch for tensor in message.tensors] for launch in draft]
    if sorted(tensor for launch in held for tensor in launch) != list(range(len(problem.trace.tensors))):
        raise ValueError("plan_of: the draft must have each tensor of the trace once")
    if problem.buckets and [sorted(launch) for launch in held] != [sorted(bucket) for bucket in problem.buckets]:
        raise ValueError("plan_of: with DDP and FSDP2 the launches of a draft must be the buckets of the trace")


def draft_of(problem: Problem, plan: Plan) -> Draft:
    """A draft for a plan, which a search can start from.

    Its plan differs from the given one if units of a message have different compressors, of which the draft keeps that
    of the most elements, or parts of different sizes.

    Raises:
        PlanError: the plan does not fit the trace.
    """
    number, draft = problem.numbers, []
    for launch in launches_of(plan, problem.trace, problem.frontend):
        merged: list[list[MessageSpec]] = []  # messages that have parts of the same tensors
        for message in group_units(launch.units, plan.channels):
            names = {name for unit in message.units for name in unit.plan.parameters}
            for group in merged:
                known = {name for other in group for unit in other.units for name in unit.plan.parameters}
                if names & known or (message.kind == group[0].kind == MessageKind.IN_PLACE):
                    group.append(message)
                    break
            else:
                merged.append([message])
        draft.append(_whole(launch, [_draft_of_message(problem, group, number) for group in merged], number))
    return tuple(draft)


def _whole(launch: BucketLaunch, messages: list[MessageDraft], number: Mapping[str, int]) -> LaunchDraft:
    """The messages of a launch with its tensors without elements, which are averaged in place, so in no message."""
    held = {tensor for message in messages for tensor in message.tensors}
    empty = {number[name] for unit in launch.units for name in unit.plan.parameters} - held
    if not empty:
        return tuple(messages)
    in_place = next((message for message in messages if message.option == Option()), MessageDraft(()))
    others = [message for message in messages if message is not in_place]
    return MessageDraft(tuple(sorted((*in_place.tensors, *empty)))), *others


def _draft_of_message(problem: Problem, messages: list[MessageSpec], number: Mapping[str, int]) -> MessageDraft:
    units = [unit.plan for message in messages for unit in message.units]
    tensors = tuple(dict.fromkeys(number[name] for unit in units for name in unit.parameters))
    if messages[0].kind == MessageKind.IN_PLACE:
        return MessageDraft(tuple(sorted(tensors)))
    elements: dict[Compressor, int] = {}
    for unit in units:
        for compressor in problem.compressors:
            if unit.compressor != Identity() and problem.fitted(number[unit.parameter], compressor) == unit.compressor:
                elements[compressor] = elements.get(compressor, 0) + unit.numel
    most = max(elements, key=lambda each: elements[each]) if elements else None
    option = Option(messages[0].program, most, len(messages), messages[0].channel % MAX_CHANNELS)
    return MessageDraft(tensors, option)
