"""Times below which no plan can bring a step, with codecs at their prices.

A plan gives every tensor an option, and so has to do some work on every resource. The bound is that of a linear
program, in which fractions of tensors may have different options:

- From the moment when a gradient is ready, every resource has to do the work of this gradient and of all later ones,
  and where backward computes, the rest of backward.
- One gradient goes through all stages of its message, in as many parts as plans may have. It is the one that ends last
  if it has the machine for itself. Often it is the largest one, and is ready when backward ends.

Work that gradients have in common in a message, such as latencies, is counted for that one gradient alone. The bound
takes for granted that a message costs no less than what the whole model costs more with its tensors than without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gckernels.planner.drafts.drafts import Option
from gckernels.planner.drafts.options import all_options, placed, variants
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.machine import Floats
from gckernels.planner.search.item_rows import RowMaker
from gckernels.planner.search.maxplus import Steps
from gckernels.planner.search.rows import NOWHERE, UNUSABLE_S

GROUPS = 24
"""Groups of neighbouring tensors, each as a whole."""
ROUNDS = 1500
"""Rounds in which the weights of the limits are improved."""
_DIRECTIONS = 400
"""Random weights of resources, for each of which the option with the least work is tried in all rounds."""


@dataclass(frozen=True)
class Limits:
    """The limits of a step: ``C >= base_s[l] + sum over groups of the work of the group's option``.

    Attributes:
        base_s: ``[limits]``, seconds that pass whatever is chosen.
        work_s: for every group ``[options, limits]``, what each option adds.
    """

    base_s: Floats
    work_s: tuple[Floats, ...]

    def least_s(self, weights: Floats) -> tuple[float, Floats]:
        """The weighted mean of the limits, which no plan is below, and the value of each of them there."""
        total_s, values_s = float(weights @ self.base_s), self.base_s.copy()
        for work_s in self.work_s:
            means_s = work_s @ weights
            best = int(means_s.argmin())
            total_s += float(means_s[best])
            values_s += work_s[best]
        return total_s, values_s


def least_step_s(problem: Problem) -> float:
    """Seconds below which no plan can bring a step, whatever its launches."""
    trace = problem.trace
    limits = limits_of(problem)
    return trace.forward_s + max(trace.backward_s, highest_s(limits)) + trace.optimizer_s


def highest_s(limits: Limits, rounds: int = ROUNDS) -> float:
    """The highest of all weighted means that is found, a bound of the largest limit.

    The weight of a limit grows in each round by as much as it is above the others with the best options. Each mean is a
    bound, so how the weights are found matters only for how high it is.
    """
    few = Limits(limits.base_s, tuple(map(_extremes, limits.work_s)))
    count = len(limits.base_s)
    best, best_s, spent_s = np.full(count, 1.0 / count), 0.0, np.zeros(count)
    reached_s, values_s = few.least_s(best)
    scale_s = max(float(values_s.max()) - reached_s, 1e-12)
    mean, total = np.zeros(count), 0.0
    for number in range(1, rounds + 1):
        weights = np.exp((spent_s - spent_s.max()) * 10 / (number**0.5 * scale_s))
        weights /= weights.sum()
        mean, total = mean + number * weights, total + number
        _, values_s = few.least_s(weights)
        spent_s += values_s
        for each in (weights, mean / total) if number % 10 == 0 else (weights,):
            reached_s = few.least_s(each)[0]
            if reached_s > best_s:
                best, best_s = each, reached_s
    return limits.least_s(best)[0]


def _extremes(work_s: Floats) -> Floats:
    """The options with the least work for some weights of the limits."""
    columns = np.unique(work_s, axis=1)
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.full(columns.shape[1], 0.3), _DIRECTIONS)
    found = np.unique((columns @ weights.T).argmin(axis=0))
    return work_s[found]


def limits_of(problem: Problem, groups: int = GROUPS) -> Limits:
    """The limits of a problem: those of every resource from every group on, and that of a single tensor.

    Args:
        problem: the problem.
        groups: the number of groups into which the tensors are cut, about equal in elements.
    """
    trace, tensors = problem.trace, problem.trace.tensors
    options = [variant for option in all_options(problem) for variant in placed(option, problem.places)]
    maker = RowMaker(problem, sharing=False)
    single, alone, alone_s = _single(problem, options)
    until = np.cumsum([0, *(tensor.numel for tensor in tensors[:-1])])
    wanted = np.linspace(0, until[-1] + tensors[-1].numel, groups, endpoint=False)
    starts = np.unique(np.append(until.searchsorted(wanted, side="right") - 1, [single, len(tensors) - 1]))
    everything = tuple(range(len(tensors)))
    parts = [everything[start:stop] for start, stop in zip(starts, [*starts[1:], len(tensors)], strict=True)]
    if single + 1 < len(tensors):
        at = next(number for number, part in enumerate(parts) if single in part)
        if len(parts[at]) > 1:  # the tensor is a group of its own
            parts[at : at + 1] = [parts[at][:1], parts[at][1:]]
    ready_s = np.array([tensors[part[0]].ready_s for part in parts])
    left_s = np.maximum(trace.backward_s - ready_s, 0.0)
    items = [everything, *(tuple(each for each in everything if each not in set(part)) for part in parts)]
    rows = maker.rows([item for item in items if item], options)
    resources = len(maker.lanes.resources)
    backward_s = maker.gaps(left_s, np.zeros(len(parts), dtype=bool), rows).work_s[:, :resources]
    usable = rows.after_s[0, 0, :, 0] < UNUSABLE_S
    count = len(parts) * resources + 1
    base_s = np.append((ready_s[:, None] + backward_s).ravel(), 0.0)
    work_s = []
    for number, part in enumerate(parts):
        if part == (single,):
            own = alone
        else:
            rest = rows.work_s[number + 1] if len(items[number + 1]) else np.zeros_like(rows.work_s[0])
            own = np.maximum(rows.work_s[0] - rest, 0.0)[usable, :resources]
        table = np.zeros((len(own), count))
        table[:, : (number + 1) * resources] = np.tile(own[:, :resources], number + 1)
        if part == (single,):
            table[:, -1] = alone_s
        work_s.append(table)
    return Limits(base_s, tuple(work_s))


def _single(problem: Problem, options: list[Option]) -> tuple[int, Floats, Floats]:
    """A large or late tensor that ends last if it has the machine for itself; the work of its options, and when each of
    them ends. Every tensor gives a bound."""
    options = list(dict.fromkeys(variant for option in options for variant in variants(option) if variant.channel == 0))
    tensors = problem.trace.tensors
    last = len(tensors) - 1
    largest = max(range(len(tensors)), key=lambda number: (tensors[number].numel, number))
    late = max(range(len(tensors) - len(tensors) // 5 - 1, len(tensors)), key=lambda each: (tensors[each].numel, each))
    found = (-1.0, 0, np.zeros((0, 0)), np.zeros(0))
    for number in dict.fromkeys((last, largest, late)):
        tensor = tensors[number]
        trace = replace(problem.trace, tensors=(tensor,), buckets=())
        alone = replace(problem, trace=trace, allowed={tensor.name: problem.allowed.get(tensor.name, ())})
        maker = RowMaker(alone, sharing=False)
        rows = maker.rows([(0,)], options).finishing_on(NOWHERE)
        waited_s = np.array([tensor.ready_s, max(trace.backward_s - tensor.ready_s, 0.0)])
        times_s = Steps(rows, [0], maker.gaps(waited_s, np.zeros(2, dtype=bool), rows)).uniform()
        usable = rows.after_s[0, 0, :, 0] < UNUSABLE_S
        ends_s = float(times_s[usable].min())
        if ends_s >= found[0]:
            found = (ends_s, number, rows.work_s[0, usable], times_s[usable])
    return found[1:]
