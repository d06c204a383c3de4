"""One choice in max-plus algebra: states and ways behind and before the chain of stages of one option.

:mod:`~.maxplus` compares all options of an item with arrays. To go through the items with one option each, short lists
of numbers are several times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

State: TypeAlias = list[float]
"""For every lane the time when it is free; or the longest way from there to the end of the step."""


class Stages(NamedTuple):
    """A chain of stages, without padding.

    Attributes:
        lanes: the lane of each stage.
        before_s: seconds from the start of the chain until each stage needs its lane.
        after_s: seconds from the start of the chain until each stage ends.
    """

    lanes: Sequence[int]
    before_s: Sequence[float]
    after_s: Sequence[float]


class OptionChain(NamedTuple):
    """Everything that an option does to a state.

    Attributes:
        chains: its chains of stages.
        first_s: seconds from its start until its second stage may start.
        work_s: the work of each resource.
    """

    chains: tuple[Stages, ...]
    first_s: float
    work_s: Sequence[float]


def behind(state: State, path: OptionChain, works: int, backward: int = 0) -> State:
    """The state after an option.

    Args:
        state: the state before it.
        path: the option.
        works: the number of the first work lane, which is behind all other lanes.
        backward: the number of the lane of backward.
    """
    after = state.copy()
    released = state[backward] + path.first_s
    for chain in path.chains:
        end, free_s = -float("inf"), [after[lane] for lane in chain.lanes]
        for lane, free, before_s, after_s in zip(chain.lanes, free_s, chain.before_s, chain.after_s, strict=True):
            start = free - before_s
            if start > end:
                end = start
            if end + after_s > after[lane]:
                after[lane] = end + after_s
    for lane, work in enumerate(path.work_s, works):
        free = after[lane]
        after[lane] = (free if free > released else released) + work
    return after


def ahead(ways: State, path: OptionChain, works: int, backward: int = 0) -> State:
    """The ways from before an option to the end of the step.

    Args:
        ways: the ways from behind it.
        path: the option.
        works: as for :func:`behind`.
        backward: likewise.
    """
    before = ways.copy()
    for chain in reversed(path.chains):
        longest, ahead_s = -float("inf"), [before[lane] for lane in chain.lanes]
        for place in range(len(chain.lanes) - 1, -1, -1):
            rest_s, lane = ahead_s[place] + chain.after_s[place], chain.lanes[place]
            if rest_s > longest:
                longest = rest_s
            if longest - chain.before_s[place] > before[lane]:
                before[lane] = longest - chain.before_s[place]
    for lane, work in enumerate(path.work_s, works):
        before[lane] += work
    if path.work_s:
        before[backward] = max(before[backward], path.first_s + max(before[works:]))
    return before


def passed(state: State, seconds: float, work_s: Sequence[float], works: int, backward: int = 0) -> State:
    """A state, or ways, with some time of the submitting thread.

    Args:
        state: the state, or the ways.
        seconds: the time.
        work_s: the work of each resource meanwhile.
        works: as for :func:`behind`.
        backward: likewise.
    """
    later = state.copy()
    later[backward] += seconds
    for lane, work in enumerate(work_s, works):
        later[lane] += work
    return later
