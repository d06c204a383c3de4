"""Times of steps in max-plus algebra, for searches that compare many options.

The state of a step is a vector: for every lane the time when it is free. A message is a chain of stages. Stage ``j``
ends at ``t[j] = max(t[j - 1] + lead[j], x[lane[j]]) + load[j]``, in which only maxima and sums occur. So ``t`` is a
cumulative maximum, which NumPy computes for all options of an item at once. All that comes behind an item is a vector,
too: for every lane the longest way from there to the end of the step. One pass from the last item to the first gives
all these vectors; a pass from the first to the last then finds the best option of each item in turn.

A stage's *lead* passes before it needs its lane. Stages on lanes that do one thing at a time have no lead.

Every shared resource has one lane more, a *work lane*, on which all its work queues, whatever the lane. So the times
are exact if nothing is shared, and lower bounds otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .machine import Floats

Ints = npt.NDArray[np.intp]
Choice = list[int]
"""The number of an option for each item."""

BACKWARD = 0
"""The lane of backward, or rather of the thread that submits messages."""
NOWHERE = 1
"""A lane for which nothing waits: padding."""
SINK = 2
"""A lane on which stages end that wait for no lane."""
FINISH = 3
"""A stand-in for the lane that waits for whole launches, which depends on the longest program of a plan."""
FIRST_LANE = 4
FAR_S = 1e12
"""Later than any step, for stages that wait for no lane."""
UNUSABLE_S = 1e6
"""The time of options that cannot be used."""

_NEVER = -np.inf
_ROUNDING_S = 1e-12
_LAZINESS = 1e-3
"""Among options of the same time the one that works less is better: seconds that a second of work counts."""


@dataclass(frozen=True)
class Rows:
    """The options of items, as chains of stages.

    An option has one chain for each of its messages. Chains and stages that it has not are padded.

    Attributes:
        lanes: ``[chains, options, stages]``, the lane of each stage. The first one is that of backward.
        before_s: ``[kinds, chains, options, stages]``, seconds from the start of the chain until the stage needs its
            lane; :data:`FAR_S` if it does not wait for it.
        after_s: ``[kinds, chains, options, stages]``, seconds from the start of the chain until the stage ends; for
            stages in backward until backward continues.
        first_s: ``[chains, options]``, seconds from the start of the chain until its second stage may start.
        work_s: ``[kinds, options, resources]``, the work of each resource over its capacity.
        several: the options with more than one chain.
        size: the number of lanes.
    """

    lanes: Ints
    before_s: Floats
    after_s: Floats
    first_s: Floats
    work_s: Floats
    several: Ints
    size: int

    def picked(self, options: Ints) -> Rows:
        """The rows with some of the options."""
        several = np.flatnonzero(np.isin(options, self.several))
        return Rows(
            self.lanes[:, options],
            self.before_s[:, :, options],
            self.after_s[:, :, options],
            self.first_s[:, options],
            self.work_s[:, options],
            several,
            self.size,
        )

    def finishing_on(self, lane: int) -> Rows:
        """The rows with the lane that waits for whole launches."""
        lanes = np.where(self.lanes == FINISH, lane, self.lanes)
        return Rows(lanes, self.before_s, self.after_s, self.first_s, self.work_s, self.several, self.size)


@dataclass(frozen=True)
class Gaps:
    """The time that passes between items.

    Attributes:
        seconds: ``[items + 1]``, seconds of the submitting thread before each item, and behind the last one.
        work_s: ``[items + 1, resources]``, the work of each resource over its capacity meanwhile.
    """

    seconds: Floats
    work_s: Floats


class Steps:
    """The times of a step for every choice of options.

    Times are seconds from the start of backward until everything is done.

    Args:
        rows: the options.
        kinds: for each item the number of its kind in the rows.
        gaps: what passes between the items.

    Attributes:
        rows, kinds, gaps: as given.
    """

    def __init__(self, rows: Rows, kinds: Sequence[int], gaps: Gaps) -> None:
        self.rows, self.kinds, self.gaps = rows, list(kinds), gaps
        self._works = slice(rows.size, rows.size + rows.work_s.shape[2])
        self._size = self._works.stop
        self._lazy_s = _LAZINESS * rows.work_s.sum(axis=2)

    # ---------------------------------------------------------------- one choice

    def start(self) -> Floats:
        """The state at the start of backward."""
        state = np.zeros(self._size)
        state[NOWHERE] = _NEVER
        return state

    def end(self) -> Floats:
        """The ways from the last item to the end of the step."""
        return self.passed(np.where(np.arange(self._size) == NOWHERE, _NEVER, 0.0), len(self.kinds))

    def passed(self, state: Floats, item: int) -> Floats:
        """A state, or a vector of ways, with the time that passes before an item."""
        return self.after_gap(state, self.gaps.seconds[item], self.gaps.work_s[item])

    def after_gap(self, state: Floats, seconds: float, work_s: Floats) -> Floats:
        """A state, or a vector of ways, with some time of the submitting thread."""
        state = state.copy()
        state[BACKWARD] += seconds
        state[self._works] += work_s
        return state

    def behind(self, state: Floats, kind: int, option: int) -> Floats:
        """The state after an item; time that passes before it has passed."""
        rows, state = self.rows, state.copy()
        released = state[BACKWARD] + rows.first_s[0, option]
        for chain in range(len(rows.lanes) if option in rows.several else 1):
            lanes = rows.lanes[chain, option]
            ends = np.maximum.accumulate(state[lanes] - rows.before_s[kind, chain, option])
            np.maximum.at(state, lanes, ends + rows.after_s[kind, chain, option])
            state[NOWHERE] = _NEVER
        state[self._works] = np.maximum(state[self._works], released) + rows.work_s[kind, option]
        return state

    def ahead(self, ways: Floats, kind: int, option: int) -> Floats:
        """The ways from before an item to the end, given those from behind it."""
        rows, before = self.rows, ways.copy()
        for chain in reversed(range(len(rows.lanes) if option in rows.several else 1)):
            lanes = rows.lanes[chain, option]
            longest = np.maximum.accumulate((before[lanes] + rows.after_s[kind, chain, option])[::-1])[::-1]
            np.maximum.at(before, lanes, longest - rows.before_s[kind, chain, option])
            before[NOWHERE] = _NEVER
        before[self._works] = ways[self._works] + rows.work_s[kind, option]
        before[BACKWARD] = max(before[BACKWARD], rows.first_s[0, option] + before[self._works].max(initial=_NEVER))
        return before

    def value(self, choice: Iterable[int]) -> float:
        """The time of a step."""
        state = self.start()
        for item, option in enumerate(choice):
            state = self.behind(self.passed(state, item), self.kinds[item], option)
        return float((state + self.end()).max())

    def ways(self, choice: Sequence[int]) -> list[Floats]:
        """For each item the ways from behind it to the end of the step."""
        ways = [self.end()]
        for item in range(len(choice) - 1, 0, -1):
            ways.append(self.passed(self.ahead(ways[-1], self.kinds[item], choice[item]), item))
        return ways[::-1]

    # ---------------------------------------------------------------- all options of an item

    def times(self, state: Floats, kind: int, ways: Floats) -> Floats:
        """``[options]``, the time of a step with each option of an item.

        Args:
            state: the state before the item, after the time that passes before it.
            kind: the kind of the item.
            ways: the ways from behind the item to the end.
        """
        rows = self.rows
        lanes = rows.lanes[0]
        ends = state[lanes]
        ends -= rows.before_s[kind, 0]
        np.maximum.accumulate(ends, axis=1, out=ends)
        ends += rows.after_s[kind, 0]
        ends += ways[lanes]
        times: Floats = ends.max(axis=1)
        if len(rows.several):
            times[rows.several] = self._times_of_several(state, kind, ways)
        released = state[BACKWARD] + rows.first_s[0]
        works = np.maximum(state[self._works], released[:, None])
        works += rows.work_s[kind]
        works += ways[self._works]
        np.maximum(times, works.max(axis=1), out=times)
        np.maximum(times, (state + ways).max(), out=times)
        return times

    def _times_of_several(self, state: Floats, kind: int, ways: Floats) -> Floats:
        """The times on lanes of the options with several chains."""
        rows, several = self.rows, self.rows.several
        states = np.repeat(state[None, : rows.size], len(several), axis=0)
        each = np.arange(len(several))[:, None]
        for chain, of_chain in enumerate(rows.lanes):
            lanes = of_chain[several]
            ends = states[each, lanes] - rows.before_s[kind, chain, several]
            np.maximum.accumulate(ends, axis=1, out=ends)
            ends += rows.after_s[kind, chain, several]
            # a lane that a chain needs twice keeps the later time, which is the last in a row
            states[each, lanes] = np.maximum(ends, states[each, lanes])
            states[:, NOWHERE] = _NEVER
        states += ways[: rows.size]
        times: Floats = states.max(axis=1)
        return times

    def lazy_times(self, state: Floats, kind: int, ways: Floats) -> Floats:
        """The same times, a little longer for options that work more, so that these are worse than their equals."""
        times = self.times(state, kind, ways)
        times += self._lazy_s[kind]
        return times

    def sweep(self, choice: Choice) -> bool:
        """Give each item in turn the best option for what the others have, and return whether anything changed."""
        changed, ways, state = False, self.ways(choice), self.start()
        for item, kind in enumerate(self.kinds):
            state = self.passed(state, item)
            times = self.lazy_times(state, kind, ways[item])
            best = int(times.argmin())
            if times[best] < times[choice[item]] - 1e-9:
                choice[item], changed = best, True
            state = self.behind(state, kind, choice[item])
        return changed

    def products(self, below_s: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        """All choices with times below ``below_s``, as pairs of time and choice."""
        idle = [self.end()]  # the ways if no item needed anything
        for item in range(len(self.kinds) - 1, 0, -1):
            idle.append(self.passed(idle[-1], item))
        stack: list[tuple[Floats, tuple[int, ...]]] = [(self.start(), ())]
        while stack:
            state, choice = stack.pop()
            item = len(choice)
            state = self.passed(state, item)
            times = self.times(state, self.kinds[item], idle[-1 - item])
            for option in np.flatnonzero(times < below_s).tolist():
                if item + 1 == len(self.kinds):
                    yield float(times[option]), (*choice, option)
                else:
                    stack.append((self.behind(state, self.kinds[item], option), (*choice, option)))

    def uniform(self) -> Floats:
        """``[options]``, the time of a step in which all items have the same option."""
        rows, ends = self.rows, self.end()
        states = np.repeat(self.start()[None], rows.lanes.shape[1], axis=0)
        each = np.arange(len(states))[:, None]
        for item, kind in enumerate(self.kinds):
            states[:, BACKWARD] += self.gaps.seconds[item]
            states[:, self._works] += self.gaps.work_s[item]
            works = np.maximum(states[:, self._works], (states[:, BACKWARD] + rows.first_s[0])[:, None])
            for chain, lanes in enumerate(rows.lanes):
                stages = np.maximum.accumulate(states[each, lanes] - rows.before_s[kind, chain], axis=1)
                states[each, lanes] = np.maximum(stages + rows.after_s[kind, chain], states[each, lanes])
                states[:, NOWHERE] = _NEVER
            states[:, self._works] = works + rows.work_s[kind]
        times: Floats = (states + ends).max(axis=1)
        return times


def undominated(rows: Rows) -> Ints:
    """The options for which no other one is as good for every item, whatever the rest of the step.

    One option is as good as another if its stages need the same lanes, and every one of them needs its lane no later
    and ends no later, and it has no more work on any resource.
    """
    options = rows.lanes.shape[1]
    rest_s = rows.after_s[..., :1] - rows.first_s[None, :, :, None]
    ends_s = rows.after_s - np.where(rows.lanes == BACKWARD, rest_s, 0.0)
    waits = rows.before_s < FAR_S
    starts_s = np.concatenate([np.zeros_like(rest_s), ends_s[..., :-1]], axis=3)
    leads_s = np.where(waits, rows.before_s - starts_s, 0.0)
    loads_s = ends_s - np.where(waits, rows.before_s, starts_s)
    costs = [np.moveaxis(each, 2, 0).reshape(options, -1) for each in (rest_s, leads_s, loads_s)]
    table = np.concatenate([*costs, np.moveaxis(rows.work_s, 1, 0).reshape(options, -1)], axis=1)
    same: dict[bytes, list[int]] = {}
    for option in range(options):
        same.setdefault(rows.lanes[:, option].tobytes() + waits[:, :, option].tobytes(), []).append(option)
    kept: list[int] = []
    for members in same.values():
        kept += _front(table[members], members)
    return np.array(sorted(kept), dtype=np.intp)


def _front(costs: Floats, members: list[int]) -> list[int]:
    """The members for which no other one is as cheap in all columns; the first one of equals."""
    front: list[int] = []
    order = np.argsort(costs.sum(axis=1), kind="stable")
    for each in order:
        if not any((costs[other] <= costs[each] + _ROUNDING_S).all() for other in front):
            front.append(int(each))
    return [members[each] for each in front]
