"""The policy ``auto``: options, parts, channels, launches and places together, from the best plans of other policies.

Estimates (:mod:`~gckernels.planner.search.search`) guide the search. The timeline judges the plans of all other
policies and the best ones of the search, and only its judgement decides.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.steps import Place

from .drafts.drafts import Draft, Option, draft_of, draft_of_launches, plan_of, step_s, usual_launches
from .drafts.options import all_options, placed, variants
from .drafts.problem import Problem
from .search.restructure import after, orders_of
from .search.search import Search, messages_of_draft, options_in, with_options

_STARTS, _UNIFORM = 4, 2
"""Plans of other policies from which the search starts, and plans with the same option for all launches."""
_FEW = 4
"""Launches up to which plans that compress a single one are tried."""
_FINALISTS, _SHARE = 6, 4
"""Plans of few tensors that the timeline judges after some changes, and the share of the trials that each one gets. The
best one gets all trials once more."""
_TRIALS, _MIN_TRIALS, _MAX_TRIALS = 3000, 16, 120
"""Tensors of all plans that are judged meanwhile, and the fewest and the most plans."""
_REST, _MAX_REST = 12000, 100
"""Likewise for the changes of the best plan at the end, with those of the order of launches."""
_FREQUENT = 6
"""Options of a plan, the most frequent ones, whose places, parts and channels are tried."""
_MANY, _MANY_TENSORS = 100, 250
"""Messages, and tensors, from which on less is searched."""
_SHORT = 48
"""Options that are tried again, for plans of many tensors: the best ones if all launches have the same."""


def auto(problem: Problem, plans: Mapping[str, Plan], starts: Sequence[Plan]) -> Plan:
    """The fastest plan that is found of those that save more than their predictions may be wrong by, or the
    plan of ``none`` if there is no such plan.

    So one of the other policies has a faster plan only where that saves less.

    Args:
        plans: the plans of other policies by name, that of ``none`` among them.
        starts: the plans from which the search starts.
    """
    found = list(plans.values())
    if problem.topology.world_size > 1:
        found += _searched(problem, starts)
    exact = plans["none"]
    exact_s, exact_error = problem.step_s(exact), problem.margin(problem.timeline(exact))
    for plan in sorted(found, key=problem.step_s):
        if not problem.is_gain(problem.step_s(plan), exact_s):
            break
        if problem.is_gain(problem.step_s(plan), exact_s, max(exact_error, problem.margin(problem.timeline(plan)))):
            return plan
    return exact


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which Python's collector of cycles does not run.

    A search makes many small objects, and no cycles of them. The collector would go through all objects of the process
    again and again, which takes a quarter of the time of a search.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _searched(problem: Problem, plans: Sequence[Plan]) -> list[Plan]:
    """The best plans of the search.

    Args:
        plans: the plans to start from.
    """
    search, options, judge = Search(problem), all_options(problem), functools.partial(step_s, problem)
    launches = usual_launches(problem)
    options = tuple(search.worthwhile(draft_of_launches(launches, Option()), options))
    halved = 1
    if len(problem.trace.tensors) > _MANY_TENSORS:
        halved, options = 2, tuple(search.shortlist([draft_of_launches(launches, Option())], options, _SHORT))
    plans = sorted(plans, key=problem.step_s)[: _STARTS // halved]
    starts = [_bounded(draft_of(problem, plan)) for plan in plans] + search.uniform(
        launches, options, _UNIFORM // halved
    )
    found = dict.fromkeys([*(_improved(search, draft, options) for draft in dict.fromkeys(starts)), *starts])
    if len(launches) <= _FEW:
        found |= dict.fromkeys(_apart(starts))
    judged = sorted(found, key=judge)
    options = tuple(search.shortlist(judged, options, _SHORT))
    trials = min(max(_TRIALS // len(problem.trace.tensors), _MIN_TRIALS), _MAX_TRIALS)
    if halved == 1:
        finalists = (_polished(problem, search, draft, options, trials // _SHARE) for draft in judged[:_FINALISTS])
        judged = sorted(finalists, key=judge)
    polished = [_polished(problem, search, judged[0], options, trials)]
    if Place.HOST in problem.places:
        polished.append(_placed(problem, search, polished[0], trials))
    best, rest = min(polished, key=judge), min(max(_REST // len(problem.trace.tensors), _MIN_TRIALS), _MAX_REST)
    polished.append(_polished(problem, search, best, options_in(best), rest, reorders=True))
    return [plan_of(problem, draft) for draft in polished if math.isfinite(judge(draft))]


def _apart(drafts: Iterable[Draft]) -> Iterable[Draft]:
    """Drafts that compress one launch of a draft and leave the others alone: where another launch is compressed, no
    change of a single launch leads there."""
    for draft in drafts:
        tensors = [tuple(tensor for message in launch for tensor in message.tensors) for launch in draft]
        exact = draft_of_launches(tensors, Option())
        yield from ((*exact[:at], draft[at], *exact[at + 1 :]) for at in range(len(draft)))


def _improved(search: Search, draft: Draft, options: tuple[Option, ...]) -> Draft:
    """A draft with better options and launches, then with better parts and channels."""
    draft = search.restructured(search.improved(draft, options))
    draft = search.improved(draft, options)
    return search.improved(draft, _variants(search.problem, draft))


def _bounded(draft: Draft) -> Draft:
    """A draft without parts if it has many messages, which need as much memory as they have parts."""
    messages = messages_of_draft(draft)
    if len(messages) <= _MANY:
        return draft
    return with_options(draft, [replace(message.option, parts=1) for message in messages])


def _variants(problem: Problem, draft: Draft) -> list[Option]:
    """The parts and channels of the most frequent options of a draft. If it has many messages, or its tensors must stay
    whole, they are not parted."""
    is_whole = problem.is_sharded or len(messages_of_draft(draft)) > _MANY
    each = (variant for option in _frequent(draft) for variant in variants(option))
    return [variant for variant in each if variant.parts == 1 or not is_whole]


def _frequent(draft: Draft) -> list[Option]:
    """The most frequent options of a draft."""
    used = Counter(message.option for message in messages_of_draft(draft))
    return [option for option, _ in used.most_common(_FREQUENT)]


def _placed(problem: Problem, search: Search, draft: Draft, trials: int) -> Draft:
    """A draft with its encodings and decodings at the better places."""
    options = [variant for option in _frequent(draft) for variant in placed(option, problem.places)]
    better = search.improved(draft, search.worthwhile(draft, options))
    return _polished(problem, search, better, options_in(better), trials)


def _polished(
    problem: Problem, search: Search, draft: Draft, options: Iterable[Option], trials: int, *, reorders: bool = False
) -> Draft:
    """A draft after changes of single messages, and of launches, that the timeline judges to be better.

    Args:
        options: the options to try.
        trials: how many drafts the timeline judges, besides those that it has judged before.
        reorders: whether the order of the last launches is changed, too. Estimates know no difference between most
            orders, so they are tried in turn with the best of all other changes. Otherwise a change that is better is
            followed by the changes of the draft that it leads to.
    """
    judge, changed = _Judge(problem, draft, trials), True
    while changed and judge.left > 0:
        changed, origin = False, judge.draft
        best = search.neighbours(origin, [*options, *_variants(problem, origin)], judge.left)
        pairs = itertools.zip_longest(orders_of(problem, origin) if reorders else (), best)
        for move in (each for pair in pairs for each in pair if each is not None):
            other = after(judge.draft, move, origin)
            if other is not None and judge.prefers(other):
                changed = True
                if not reorders:
                    break
    return judge.draft


class _Judge:
    """The best of the drafts that the timeline has judged.

    Args:
        draft: the first draft.
        trials: how many drafts the timeline judges, besides those that it has judged before.

    Attributes:
        draft: the best draft.
        left: the trials that are left.
    """

    def __init__(self, problem: Problem, draft: Draft, trials: int) -> None:
        self.draft, self.left = draft, trials
        self._problem, self._best_s, self._tried = problem, step_s(problem, draft), {draft}

    def prefers(self, other: Draft) -> bool:
        """Judge another draft, if there is a trial left for it, and return whether it is the best one now."""
        if other in self._tried or self.left <= 0:
            return False
        self._tried.add(other)
        self.left -= other not in self._problem.judged_drafts
        other_s = step_s(self._problem, other)
        is_better = other_s < self._best_s * (1.0 - 1e-6)
        if is_better:
            self.draft, self._best_s = other, other_s
        return is_better
