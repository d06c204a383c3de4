"""The predicted times of drafts, as the timeline judges their plans, without making the plans.

A search judges many drafts that differ in one or two launches. So launches are prepared once: their units, their
messages, and the priced stages of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from ...plans.grouping import MessageSpec, PlacedUnit, whole_bucket
from ...plans.plan import Frontend, UnitPlan
from ..machines.machine import MachineError
from ..timeline.launches import BucketLaunch, grouped
from ..timeline.loads import Loads, loads_of, total
from ..timeline.priced_stages import PricedStage
from ..timeline.step_context import Whole, phases_of_units
from ..timeline.timeline import Step
from .drafts import Draft, LaunchDraft, MessageDraft, roots_of, units_of
from .problem import Problem

_KEPT = 5000
"""Launches that are kept."""
_Messages: TypeAlias = tuple[tuple[MessageSpec, tuple[PricedStage, ...]], ...]


class _Prepared(NamedTuple):
    """A launch that is prepared.

    Attributes:
        launch: the launch, ready when its own tensors are.
        messages: its messages, with their priced stages; ``None`` if the machine lacks a price.
        loads: the loads of its messages.
        phases: the number of collectives of the longest program.
    """

    launch: BucketLaunch
    messages: _Messages | None
    loads: Loads
    phases: int


def step_s(problem: Problem, draft: Draft) -> float:
    """The predicted seconds of a step with the plan of a draft; infinite if the machine lacks a price. Results are
    kept."""
    known = problem.judged_drafts
    if draft not in known:
        known[draft] = _step_s(problem, draft)
    return known[draft]


def _step_s(problem: Problem, draft: Draft) -> float:
    without_hook = problem.frontend == Frontend.DDP and all(
        _is_plain(problem, each) for each in itertools.chain(*draft)
    )
    roots, first, keys = roots_of(problem, draft), 0, []
    for number, launch in enumerate(draft):
        given = []
        for message in launch:
            given.append(roots.get(first, message.option.root or 0))
            first += message.option.parts
        keys.append(_Key(launch, number if problem.buckets else None, tuple(given), without_hook))
    launches = _prepared(problem, keys)
    messages = [each.messages for each in launches if each.messages is not None]
    if len(messages) < len(launches):
        return math.inf
    ready_s = itertools.accumulate((each.launch.ready_s for each in launches), max)
    ordered = [replace(each.launch, ready_s=ready) for each, ready in zip(launches, ready_s, strict=True)]
    phases = max(each.phases for each in launches)
    whole = Whole.of(without_hook, phases, [each.loads for each in launches], problem.trace, problem.machine)
    return Step(ordered, messages, whole, problem.trace, problem.pricer, problem.frontend).timeline().step_s


def _is_plain(problem: Problem, message: MessageDraft) -> bool:
    """Whether all units of a message are averaged in place."""
    return message.option.in_place or not any(map(problem.encodable, message.tensors))


class _Key(NamedTuple):
    """Everything on which a prepared launch depends.

    Attributes:
        draft: the launch.
        bucket: the number of its bucket; ``None`` for a bare module.
        roots: the root of each message.
        without_hook: whether DDP averages all gradients itself.
    """

    draft: LaunchDraft
    bucket: int | None
    roots: tuple[int, ...]
    without_hook: bool


def _prepared(problem: Problem, keys: Sequence[_Key]) -> list[_Prepared]:
    """Launches, prepared. They are kept."""
    known = problem.prepared
    if len(known) >= _KEPT:
        known.clear()
    new = [key for key in dict.fromkeys(keys) if key not in known]
    launches = [_launch(problem, key) for key in new]
    specs = [
        (whole_bucket(launch.units, launch.numel),) if key.without_hook else grouped(launch.units)
        for key, launch in zip(new, launches, strict=True)
    ]
    for key, launch, each, messages in zip(new, launches, specs, _priced(problem, launches, specs), strict=True):
        units = [unit.plan for spec in each for unit in spec.units]
        loads = (loads_of(stages, spec.units[0].plan.root, problem.machine) for spec, stages in messages or ())
        known[key] = _Prepared(launch, messages, total(loads), phases_of_units(units))
    return [known[key] for key in keys]


def _priced(
    problem: Problem, launches: Sequence[BucketLaunch], specs: Sequence[tuple[MessageSpec, ...]]
) -> list[_Messages | None]:
    """The messages of launches with their priced stages; ``None`` for a launch of which the machine lacks a price."""
    if problem.topology.world_size == 1:
        return [()] * len(launches)
    both = [(spec, launch.dtype) for launch, each in zip(launches, specs, strict=True) for spec in each]
    try:
        priced = iter(problem.pricer.messages(both))
    except MachineError:
        if len(launches) == 1:
            return [None]
        return [_priced(problem, [launch], [each])[0] for launch, each in zip(launches, specs, strict=True)]
    return [tuple((spec, next(priced)) for spec in each) for each in specs]


def _launch(problem: Problem, key: _Key) -> BucketLaunch:
    """The launch of a draft, ready when its own tensors are."""
    of_tensor: dict[int, list[UnitPlan]] = {}
    number, launch = 0, 0 if key.bucket is None else None
    for message, root in zip(key.draft, key.roots, strict=True):
        for tensor in message.tensors:
            of_tensor[tensor] = units_of(problem, tensor, message.option, root, launch, number)
        number += message.option.parts
    order = tuple(of_tensor) if key.bucket is None else problem.buckets[key.bucket]
    tensors, placed, start = problem.trace.tensors, [], 0
    for tensor in order:
        placed += [PlacedUnit(unit, start + (unit.start or 0)) for unit in of_tensor[tensor]]
        start += tensors[tensor].numel
    ready_s = max(tensors[tensor].ready_s for tensor in order)
    return BucketLaunch(tuple(placed), start, tensors[order[0]].dtype.to_real(), ready_s)
