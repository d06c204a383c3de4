"""The policy ``cupcake``: the fastest fusion of a model's gradients, and the times of groups of neighbours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.rivals.fusion import Groups, best_groups, best_groups_of_any, encode_table
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.planner.drafts.drafts import Launches, Option, carried, plan_of
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.machine import Floats, MachineError
from gckernels.planner.policies.baselines import fastest
from gckernels.planner.policies.messages import JUDGED, codecs, uniform_draft, usual_options, usual_programs
from gckernels.planner.timeline.pricing import Ints, Units
from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.named import ALLREDUCE
from gckernels.sync.programs.stages import MessageKind
from gckernels.sync.programs.steps import Program

AFFINE = 0.01
"""The largest relative deviation at which times count as a constant plus a sum, so that their groups are exact."""
TOLERANCE = 1e-3
"""As for :func:`~.fusion.best_groups_of_any`."""
WINDOWS = (1, 8, 64)
"""Sizes of the groups with which a fit is compared."""
_MAX_EXACT = 400
"""Tensors of a model up to which groups with any prices are searched."""


def cupcake(problem: Problem) -> Plan:
    """The plan whose launches are the fastest groups in Cupcake's model (:mod:`~.fusion`).

    In that model, encoding and decoding delay backward, and groups are sent one after the other. The groups are exact
    for prices that are a constant plus a sum; for other prices they are exact to 0.1 percent. The options with the
    fastest groups, a compressor and a program for all tensors, are compared on the timeline.

    With DDP the groups are DDP's buckets, which a plan cannot change; only the option is chosen. Without compressors it
    is the plan of ``none``.
    """
    if problem.buckets:
        found = [(option, problem.buckets) for option in usual_options(problem)]
    else:
        found = [(option, launches_of(groups)) for option, groups in _searched(problem)]
    return fastest(problem, [plan_of(problem, uniform_draft(problem, launches, option)) for option, launches in found])


def launches_of(groups: Groups) -> Launches:
    """The tensors of each group."""
    starts = (0, *groups.ends[:-1])
    return tuple(tuple(range(start, end)) for start, end in zip(starts, groups.ends, strict=True))


def _searched(problem: Problem) -> list[tuple[Option, Groups]]:
    """The options with the fastest groups, of those that the machine has prices for, and these groups; the fastest one
    first.

    The search for any prices is long, so only the first option goes through it.
    """
    priced: list[tuple[Option, FusionCosts]] = []
    for compressor in codecs(problem):
        programs = usual_programs(problem, compressor)
        priced += [
            (Option(program, compressor), costs)
            for program, costs in zip(programs, fusion_costs(problem, compressor, programs), strict=True)
            if costs is not None
        ]
    found: list[tuple[Option, Groups, FusionCosts]] = []
    for option, costs in sorted(priced, key=lambda each: each[1].bound_s):
        below_s = found[-1][1].step_s if len(found) == JUDGED else math.inf
        if costs.bound_s >= below_s:
            break
        groups = costs.groups(below_s)
        if groups is not None:
            found = sorted([*found, (option, groups, costs)], key=lambda each: each[1].step_s)[:JUDGED]
    if found and found[0][2].error > AFFINE and len(problem.trace.tensors) <= _MAX_EXACT:
        option, groups, costs = found[0]
        found[0] = (option, exact_groups(problem, option, costs, groups), costs)
    return [(option, groups) for option, groups, _ in found]


# -------------------------------------------------------------------- the times of groups


@dataclass(frozen=True)
class FusionCosts:
    """Times of groups, each a constant plus a sum over the tensors of the group. All times are in seconds.

    Attributes:
        backward_s: ``[n]``, backward of each tensor.
        encode_fixed_s: constant of computing: encoding, decoding and copying of a group.
        encode_each_s: ``[n]``, computing for each tensor.
        send_fixed_s: constant of sending a group.
        send_each_s: ``[n]``, sending of each tensor.
        error: the largest deviation from the prices of some groups, relative to the price of all tensors together.
        runs: ``[n]``, the number of the run of tensors of one dtype; groups lie inside a run.
    """

    backward_s: Floats
    encode_fixed_s: float
    encode_each_s: Floats
    send_fixed_s: float
    send_each_s: Floats
    error: float
    runs: Floats

    @property
    def bound_s(self) -> float:
        """A lower bound of the time of all groups: backward with all encodings and the end of the last sending, or all
        sendings one after the other."""
        computed_s = float(self.backward_s.sum() + self.encode_each_s.sum()) + self.encode_fixed_s
        last_s = self.send_fixed_s + float(self.send_each_s[-1])
        sent_s = float(self.backward_s[0] + self.encode_each_s[0]) + self.encode_fixed_s + self.send_fixed_s
        return max(computed_s + last_s, sent_s + float(self.send_each_s.sum()))

    def groups(self, below_s: float = np.inf) -> Groups | None:
        """The fastest groups; ``None`` if none are faster than ``below_s``."""
        send_s = within_runs(encode_table(self.send_fixed_s, self.send_each_s), self.runs)
        return best_groups(self.backward_s, self.encode_fixed_s, self.encode_each_s, send_s, below_s)


class GroupTimes(NamedTuple):
    """The times of groups.

    Attributes:
        compute_s: ``[groups]``, seconds of computing.
        send_s: ``[groups]``, seconds of sending.
    """

    compute_s: Floats
    send_s: Floats


def fusion_costs(problem: Problem, compressor: Compressor, programs: Sequence[Program]) -> list[FusionCosts | None]:
    """The times of groups that are sent with one compressor, for each of some programs; ``None`` for those for which
    the machine lacks a price."""
    tensors = problem.trace.tensors
    num = len(tensors)
    all_starts, all_stops = np.arange(num), np.arange(1, num + 1)
    windows = [(all_starts[: max(num - size, 0)], all_stops[size:]) for size in WINDOWS]
    starts = np.concatenate([all_starts, 0 * all_starts, all_starts, *(start for start, _ in windows)])
    stops = np.concatenate([all_stops, all_stops, 0 * all_starts + num, *(stop for _, stop in windows)])
    users = problem.users[compressor]
    compressed = np.array([number in users for number in range(num)])
    ready_s = np.maximum.accumulate([0.0, *(tensor.ready_s for tensor in tensors)])
    runs = np.cumsum([0.0, *(one.dtype != other.dtype for one, other in itertools.pairwise(tensors))])
    found: list[FusionCosts | None] = []
    for times in group_times(problem, starts, stops, compressor, programs):
        if times is None:
            found.append(None)
            continue
        (encode_fixed_s, encode_each_s, encode_error), (send_fixed_s, send_each_s, send_error) = (
            _fit(each, compressed, starts, stops) for each in times
        )
        error = max(encode_error, send_error)
        found.append(
            FusionCosts(np.diff(ready_s), encode_fixed_s, encode_each_s, send_fixed_s, send_each_s, error, runs)
        )
    return found


def exact_groups(problem: Problem, option: Option, costs: FusionCosts, tried: Groups) -> Groups:
    """The fastest groups from the price of every group, whatever its form.

    Args:
        problem: the problem.
        option: how groups are sent.
        costs: the costs of groups with the option.
        tried: the fastest groups by these costs.
    """
    assert option.compressor is not None
    num = len(costs.backward_s)
    starts, last = np.triu_indices(num)
    encode_s, send_s = np.zeros((num + 1, num + 1)), np.zeros((num + 1, num + 1))
    (times,) = group_times(problem, starts, last + 1, option.compressor, [option.program])
    assert times is not None  # the costs have the same prices
    encode_s[starts, last + 1], send_s[starts, last + 1] = times
    return best_groups_of_any(costs.backward_s, encode_s, within_runs(send_s, costs.runs), TOLERANCE, tried.ends)


def group_times(
    problem: Problem, starts: Ints, stops: Ints, compressor: Compressor, programs: Sequence[Program]
) -> list[GroupTimes | None]:
    """The times of groups of the tensors from ``starts`` up to ``stops``, for each of some programs; ``None`` for
    those for which the machine lacks a price."""
    message, beside = carried(problem, range(len(problem.trace.tensors)), Option(programs[0], compressor))
    compressed = [number for number in message if number in problem.users[compressor]]
    small = sorted({*message} - {*compressed})
    encoded = _units(problem, compressor, compressed, starts, stops)
    raw, light = (_units(problem, Identity(), each, starts, stops) for each in (beside, small))
    compresses = encoded.counts > 0
    in_message, in_place = (
        replace(light, stops=np.where(which, light.stops, light.starts)) for which in (compresses, ~compresses)
    )
    reduces = (raw.counts + in_place.counts) > 0
    (exact,) = _times(problem, MessageKind.IN_PLACE, (ALLREDUCE,), (raw, in_place), reduces, starts)
    each = _times(problem, MessageKind.ENCODED, programs, (encoded, in_message), compresses, starts)
    return [
        None
        if exact is None or times is None
        else GroupTimes(times.compute_s + exact.compute_s, times.send_s + exact.send_s)
        for times in each
    ]


def _times(
    problem: Problem,
    kind: MessageKind,
    programs: Sequence[Program],
    units: Sequence[Units],
    sent: npt.NDArray[np.bool_],
    starts: Ints,
) -> list[GroupTimes | None]:
    """The times of a message of every group, for each program.

    Args:
        problem: the problem.
        kind: the kind of the messages.
        programs: the programs.
        units: the units of every group.
        sent: ``[groups]``, which groups have such a message.
        starts: ``[groups]``, the first tensor of each group, whose dtype it has.
    """
    times: list[GroupTimes | None] = [GroupTimes(np.zeros(len(starts)), np.zeros(len(starts))) for _ in programs]
    dtypes = [tensor.dtype for tensor in problem.trace.tensors]
    for dtype in dict.fromkeys(dtypes) if sent.any() else ():
        priced = sent & np.array([each == dtype for each in dtypes])[starts]
        for number, stages in enumerate(problem.pricer.table(kind, programs, units, dtype)):
            of_program = times[number]
            if isinstance(stages, MachineError) or of_program is None:
                times[number] = None
                continue
            for stage in stages:
                target = of_program.send_s if stage.spec.resource.does == "communicate" else of_program.compute_s
                np.add(target, stage.price.alone_s, out=target, where=priced)
    return times


def within_runs(send_s: Floats, runs: Floats) -> Floats:
    """The times to send, infinite for groups that are not within a run."""
    first, last = np.append(runs, runs[-1])[:, None], np.concatenate([runs[:1], runs])[None, :]
    result: Floats = np.where((first == last) | np.tri(len(runs) + 1, dtype=bool), send_s, np.inf)
    return result


def _units(problem: Problem, compressor: Compressor, members: Sequence[int], starts: Ints, stops: Ints) -> Units:
    """The units of every group, of those tensors that are ``members``."""
    tensors = problem.trace.tensors
    units = Units.of(compressor, [[tensors[number].numel] for number in members])
    until = np.searchsorted(members, np.arange(len(tensors) + 1))  # the members before each tensor
    return replace(units, starts=until[starts], stops=until[stops])


def _fit(times_s: Floats, compressed: npt.NDArray[np.bool_], starts: Ints, stops: Ints) -> tuple[float, Floats, float]:
    """The constant, the time of each tensor, and the error of that form.

    A tensor costs as much as the group of all tensors before it grows with it; those up to the first compressed one as
    much as the group of all tensors behind it does.

    Args:
        times_s: ``[groups]``: every tensor alone, all first ones, all last ones, and other groups.
        compressed: ``[n]``, which tensors are compressed, at least one.
        starts, stops: ``[groups]``.
    """
    num = len(compressed)
    alone_s, first_s, last_s = times_s[:num], times_s[num : 2 * num], times_s[2 * num : 3 * num]
    from_first, from_last = np.diff(first_s, prepend=0.0), -np.diff(last_s, append=0.0)
    each_s = np.where(np.arange(num) <= int(compressed.argmax()), from_last, from_first)
    if compressed.sum() == 1:
        each_s[compressed] = 0.0
    each_s = np.maximum(each_s, 0.0)
    fixed_s = max(float(np.median((alone_s - each_s)[compressed])), 0.0)
    total_s = np.concatenate([[0.0], each_s.cumsum()])
    counts = np.concatenate([[0], compressed.cumsum()])
    comparable = counts[stops] > counts[starts]
    error = np.abs(fixed_s + total_s[stops] - total_s[starts] - times_s)[comparable].max()
    return fixed_s, each_s, float(error / max(first_s[-1], 1e-12))
