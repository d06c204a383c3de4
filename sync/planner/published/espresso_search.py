"""Espresso's two searches (Wang et al., EuroSys 2023, section 4), for any time of a step.

Algorithm 1 takes the launches from the largest to the smallest, and gives each the option with which the step is
fastest. It leaves out launches that do not lengthen the step, as those that are sent before a pause (``Remove`` in the
paper). Algorithm 2 moves compression to the host. Among launches of the same size with
the same option those that are ready first are moved first (the paper's Lemma 1), so only their number is searched.

The paper calls the input of the model its output layer: the gradient that is ready last counts as nearest to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from ..maxplus.changes import Changes

MAX_TRAVERSED = 512
"""The largest number of combinations of counts that are all tried."""
LAZINESS = 0.1
"""The part of a second of the step that a second of work counts as. Where another resource limits the step, for now,
options take nearly equally long; then the one that works less is better for the launches that follow."""


def choose_options(times: Changes, numels: Sequence[int]) -> None:
    """Algorithm 1; changes the choice of ``times``.

    Args:
        times: times of the step, with the choice to start from, which compresses nothing.
        numels: the elements of each launch.
    """
    for launch in sorted(range(len(numels)), key=lambda launch: (-numels[launch], -launch)):
        if times.is_hidden(launch):
            continue
        options_s = times.options_s(launch) + LAZINESS * times.work_s(launch)
        best = int(options_s.argmin())
        if options_s[best] < options_s[times.choice[launch]]:
            times.choose(launch, best)


def offload(times: Changes, numels: Sequence[int], on_host: dict[int, int], max_traversed: int = MAX_TRAVERSED) -> None:
    """Algorithm 2; changes the choice of ``times``.

    Args:
        times: times of the step, with the choice that Algorithm 1 has found.
        numels: the elements of each launch.
        on_host: for each option that can be moved, the same option on the host.
        max_traversed: as :data:`MAX_TRAVERSED`. If there are more combinations, the counts are improved one at a time,
            from none, half and all of each group on the host.
    """
    groups = offload_groups(times.choice, numels, on_host)
    start = times.choice

    def timed(counts: Sequence[int]) -> float:
        times.choose_all(_moved(start, groups, counts, on_host))
        return times.step_s()

    if math.prod(len(group) + 1 for group in groups) <= max_traversed:
        timed(min(itertools.product(*(range(len(group) + 1) for group in groups)), key=timed))
        return
    found = []
    for part in (0.0, 0.5, 1.0):
        found.append(_improved([round(part * len(group)) for group in groups], groups, timed))
    timed(min(found, key=timed))


def _improved(counts: list[int], groups: Sequence[Sequence[int]], timed: Callable[[Sequence[int]], float]) -> list[int]:
    """The counts after changing one at a time for as long as that helps."""
    best_s, improved = timed(counts), True
    while improved:
        improved = False
        for index, group in enumerate(groups):
            for count in range(len(group) + 1):
                tried = [*counts[:index], count, *counts[index + 1 :]]
                tried_s = timed(tried)
                if tried_s < best_s * (1 - 1e-9):
                    best_s, counts, improved = tried_s, tried, True
    return counts


def offload_groups(choice: Sequence[int], numels: Sequence[int], on_host: dict[int, int]) -> list[list[int]]:
    """The launches that can be moved to the host, by size and option, each group in the order of backward."""
    groups: dict[tuple[int, int], list[int]] = {}
    for launch, option in enumerate(choice):
        if option in on_host:
            groups.setdefault((numels[launch], option), []).append(launch)
    return list(groups.values())


def _moved(
    choice: Sequence[int], groups: Sequence[Sequence[int]], counts: Sequence[int], on_host: dict[int, int]
) -> list[int]:
    """The choice with the first launches of each group on the host."""
    moved = list(choice)
    for group, count in zip(groups, counts, strict=True):
        for launch in group[:count]:
            moved[launch] = on_host[moved[launch]]
    return moved
