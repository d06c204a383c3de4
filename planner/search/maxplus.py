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

import operator
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from ..machines.machine import Floats
from ..timeline.pricing import Ints
from .rows import BACKWARD, NOWHERE, Gaps, Rows

Choice = list[int]
"""The number of an option for each item."""
State: TypeAlias = list[float]
"""For every lane the time when it is free; or the longest way from there to the end of the step."""

_NEVER = -float("inf")
_LAZINESS = 1e-3
"""Among options of the same time the one that works less is better: seconds that a second of work counts."""


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
        self._lazy_s = _LAZINESS * rows.work_s.sum(axis=2)
        self._gaps = list(zip(gaps.seconds.tolist(), gaps.work_s.tolist(), strict=True))

    # ---------------------------------------------------------------- one choice: short lists are faster than arrays

    def start(self) -> State:
        """The state at the start of backward."""
        state = [0.0] * self._works.stop
        state[NOWHERE] = _NEVER
        return state

    def end(self) -> State:
        """The ways from the last item to the end of the step."""
        return self.passed(self.start(), len(self.kinds))

    def passed(self, state: State, item: int) -> State:
        """A state, or ways, with the time that passes before an item."""
        return self.after_gap(state, *self._gaps[item])

    def after_gap(self, state: State, seconds: float, work_s: Sequence[float]) -> State:
        """A state, or ways, with some time of the submitting thread."""
        later = state.copy()
        later[BACKWARD] += seconds
        for lane, work in enumerate(work_s, self.rows.size):
            later[lane] += work
        return later

    def behind(self, state: State, kind: int, option: int) -> State:
        """The state after an item; time that passes before it has passed."""
        path, after = self.rows.path(kind, option), state.copy()
        released = state[BACKWARD] + path.first_s
        for chain in path.chains:
            end, free_s = _NEVER, [after[lane] for lane in chain.lanes]
            for lane, free, before_s, after_s in zip(chain.lanes, free_s, chain.before_s, chain.after_s, strict=True):
                start = free - before_s
                if start > end:
                    end = start
                if end + after_s > after[lane]:
                    after[lane] = end + after_s
        for lane, work in enumerate(path.work_s, self.rows.size):
            free = after[lane]
            after[lane] = (free if free > released else released) + work
        return after

    def ahead(self, ways: State, kind: int, option: int) -> State:
        """The ways from before an item to the end, given those from behind it."""
        path, before = self.rows.path(kind, option), ways.copy()
        for chain in reversed(path.chains):
            longest_s, ahead_s = _NEVER, [before[lane] for lane in chain.lanes]
            for place in range(len(chain.lanes) - 1, -1, -1):
                rest_s, lane = ahead_s[place] + chain.after_s[place], chain.lanes[place]
                if rest_s > longest_s:
                    longest_s = rest_s
                if longest_s - chain.before_s[place] > before[lane]:
                    before[lane] = longest_s - chain.before_s[place]
        for lane, work in enumerate(path.work_s, self.rows.size):
            before[lane] += work
        if path.work_s:
            before[BACKWARD] = max(before[BACKWARD], path.first_s + max(before[self.rows.size :]))
        return before

    def value(self, choice: Iterable[int]) -> float:
        """The time of a step."""
        state = self.start()
        for item, option in enumerate(choice):
            state = self.behind(self.passed(state, item), self.kinds[item], option)
        return longest(state, self.end())

    def ways(self, choice: Sequence[int]) -> list[State]:
        """For each item the ways from behind it to the end of the step."""
        ways = [self.end()]
        for item in range(len(choice) - 1, 0, -1):
            ways.append(self.passed(self.ahead(ways[-1], self.kinds[item], choice[item]), item))
        return ways[::-1]

    # ---------------------------------------------------------------- all options of an item

    def times(self, before: State, kind: int, behind: State) -> Floats:
        """``[options]``, the time of a step with each option of an item.

        Args:
            before: the state before the item, after the time that passes before it.
            kind: the kind of the item.
            behind: the ways from behind the item to the end.
        """
        rows, state, ways = self.rows, np.array(before), np.array(behind)
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
        np.maximum(times, works.max(axis=1, initial=_NEVER), out=times)
        np.maximum(times, (state + ways).max(), out=times)
        return times

    def _times_of_several(self, state: Floats, kind: int, ways: Floats) -> Floats:
        """The times on lanes of the options with several chains."""
        states = np.repeat(state[None, : self.rows.size], len(self.rows.several), axis=0)
        self._pass_chains(states, kind, self.rows.several)
        states += ways[: self.rows.size]
        times: Floats = states.max(axis=1)
        return times

    def _pass_chains(self, states: Floats, kind: int, options: Ints | slice) -> None:
        """Let states, one for each of some options, pass the chains of these for a kind of items."""
        rows, each = self.rows, np.arange(len(states))[:, None]
        for chain, of_chain in enumerate(rows.lanes):
            lanes = of_chain[options]
            ends = states[each, lanes] - rows.before_s[kind, chain, options]
            np.maximum.accumulate(ends, axis=1, out=ends)
            ends += rows.after_s[kind, chain, options]
            # a lane that a chain needs twice keeps the later time, which is the last in a row
            states[each, lanes] = np.maximum(ends, states[each, lanes])
            states[:, NOWHERE] = _NEVER

    def lazy_times(self, state: State, kind: int, ways: State) -> Floats:
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

    def uniform(self) -> Floats:
        """``[options]``, the time of a step in which all items have the same option."""
        rows, ends = self.rows, np.array(self.end())
        states = np.repeat(np.array(self.start())[None], rows.lanes.shape[1], axis=0)
        for item, kind in enumerate(self.kinds):
            states[:, BACKWARD] += self.gaps.seconds[item]
            states[:, self._works] += self.gaps.work_s[item]
            works = np.maximum(states[:, self._works], (states[:, BACKWARD] + rows.first_s[0])[:, None])
            self._pass_chains(states, kind, slice(None))
            states[:, self._works] = works + rows.work_s[kind]
        times: Floats = (states + ends).max(axis=1)
        return times


def longest(state: State, ways: State) -> float:
    """The time of a step from the state at some place of it and the ways from there."""
    seconds: float = max(map(operator.add, state, ways))
    return seconds
