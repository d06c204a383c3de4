"""The policy ``espresso``: an option of Espresso's tree for every tensor (Wang et al., EuroSys 2023, section 4).

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
from dataclasses import replace

from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.steps import Coding, Hop, Place, Program

from ..drafts.drafts import Launches, Option, draft_of_launches, plan_of
from ..drafts.options import options_of
from ..drafts.problem import Problem
from ..machines.machine import Floats
from ..search.maxplus import Choice, State, Steps, longest
from ..search.rows import BACKWARD
from ..search.search import Search, with_options
from .messages import codecs, each_alone

MAX_TRAVERSED = 512
"""The largest number of combinations of counts that are all tried."""
LAZINESS = 0.1
"""The part of a second of the step that a second of work counts as. Where another resource limits the step, for now,
options take nearly equally long; then the one that works less is better for the launches that follow."""
_ROUNDING = 1e-12


def espresso(problem: Problem) -> Plan:
    """The plan of Espresso's two algorithms: options by size; then, if the problem has the host, what moves there.

    A bare module launches every tensor alone. DDP launches its buckets, which take the place of tensors. Methods that
    send factors are not in Espresso's tree, and are not used. The algorithms compare estimates. So the timeline decides
    whether moving anything to the host has made the step faster.
    """
    launches = each_alone(problem)
    numels = [sum(problem.trace.tensors[tensor].numel for tensor in launch) for launch in launches]
    search = Search(problem)
    draft = draft_of_launches(launches, Option())
    chosen = best_options(search, launches, numels, _options(problem))
    plan = plan_of(problem, with_options(draft, chosen))
    if Place.HOST not in problem.places:
        return plan
    moved = plan_of(problem, with_options(draft, offloaded(search, launches, numels, chosen)))
    return min(plan, moved, key=problem.step_s)


def best_options(search: Search, launches: Launches, numels: Sequence[int], options: Sequence[Option]) -> list[Option]:
    """The option of each launch by Algorithm 1.

    It starts from that option for all launches which is the fastest of those that compress nothing.
    """
    at_root = _at_root(options)
    exact = [option for option in at_root if option.compressor is None]
    (start,) = search.uniform(launches, exact, 1)
    first = at_root.index(start[0][0].option)
    times = Changes(search.steps(start, at_root), [first] * len(launches))
    choose_options(times, numels)
    return [options[option] for option in times.choice]


def offloaded(search: Search, launches: Launches, numels: Sequence[int], chosen: Sequence[Option]) -> list[Option]:
    """The options with some of the compression on the host, by Algorithm 2."""
    used = list(dict.fromkeys(chosen))
    moved = [index for index, option in enumerate(used) if option.compressor is not None]
    options = [*used, *(replace(used[index], program=on_host(used[index].program)) for index in moved)]
    steps = search.steps(draft_of_launches(launches, Option()), _at_root(options))
    times = Changes(steps, [used.index(option) for option in chosen])
    offload(times, numels, {index: len(used) + place for place, index in enumerate(moved)})
    return [options[option] for option in times.choice]


def _at_root(options: Sequence[Option]) -> list[Option]:
    """The options with the same root for all launches, so that estimates have its work."""
    return [replace(option, root=0) for option in options]


def on_host(program: Program) -> Program:
    """The program with all its encodings and decodings on the host."""
    return tuple(replace(step, place=Place.HOST) if isinstance(step, Coding) else step for step in program)


def _options(problem: Problem) -> list[Option]:
    """All options on the device, first those that compress nothing. Rings are not in Espresso's tree."""
    found = (option for compressor in (None, *codecs(problem)) for option in options_of(problem, compressor))
    return [option for option in found if not any(isinstance(step, Hop) for step in option.program)]


# -------------------------------------------------------------------- the two algorithms


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
        for launch, option in enumerate(_moved(start, groups, counts, on_host)):
            times.choose(launch, option)
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


class Changes:
    """The time of a step for a choice that is changed one item at a time.

    States before and ways behind a change are kept, so that calls for neighbouring items are cheap.

    Args:
        steps: the times of steps.
        choice: the first choice.
    """

    def __init__(self, steps: Steps, choice: Sequence[int]) -> None:
        self._steps, self._choice = steps, list(choice)
        # the states before each item, after the time that passes before it
        self._before: list[State] = [steps.passed(steps.start(), 0)]
        last = len(self._choice) - 1
        self._behind: dict[int, State] = {last: steps.end()}
        self._behind_from = last

    @property
    def choice(self) -> Choice:
        """The option of each item."""
        return self._choice.copy()

    def step_s(self) -> float:
        """The time of the step."""
        item = len(self._before) - 1  # where the least has to be computed anew
        return longest(self._before[item], self._ahead(item))

    def choose(self, item: int, option: int) -> None:
        """Change the option of an item."""
        if self._choice[item] != option:
            self._choice[item] = option
            del self._before[item + 1 :]
            self._behind_from = max(self._behind_from, item)

    def options_s(self, item: int) -> Floats:
        """``[options]``, the time of the step with each option for one item, the others as they are."""
        return self._steps.times(self._state(item), self._steps.kinds[item], self._ways(item))

    def work_s(self, item: int) -> Floats:
        """``[options]``, the work of each option for an item, on all resources together."""
        total: Floats = self._steps.rows.work_s[self._steps.kinds[item]].sum(axis=1)
        return total

    def is_hidden(self, item: int) -> bool:
        """Whether the step takes as long if the item is submitted, and nothing of it is done.

        With one lane for all communication these are the items before a pause of it: if they were sent faster, the
        pause would be longer and nothing else.
        """
        ways, state = self._ways(item), self._state(item)
        submitted = state.copy()
        submitted[BACKWARD] += self._steps.rows.path(self._steps.kinds[item], self._choice[item]).chains[0].after_s[0]
        return longest(submitted, ways) >= longest(state, self._ahead(item)) * (1 - _ROUNDING)

    def _state(self, item: int) -> State:
        """The state before an item."""
        steps, before = self._steps, self._before
        while len(before) <= item:
            last = len(before) - 1
            before.append(steps.passed(steps.behind(before[last], steps.kinds[last], self._choice[last]), last + 1))
        return before[item]

    def _ahead(self, item: int) -> State:
        """The ways from before an item."""
        return self._steps.ahead(self._ways(item), self._steps.kinds[item], self._choice[item])

    def _ways(self, item: int) -> State:
        """The ways from behind an item."""
        steps = self._steps
        while self._behind_from > item:
            at = self._behind_from
            self._behind[at - 1], self._behind_from = steps.passed(self._ahead(at), at), at - 1
        return self._behind[item]
