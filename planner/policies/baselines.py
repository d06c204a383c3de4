"""The policies that are no published systems: no compressor, one compressor, and a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.accuracy.accuracy import unfitted
from gckernels.sync.plans.plan import Plan

from ..drafts.drafts import Draft, LaunchDraft, MessageDraft, Option, draft_of_launches, plan_of, usual_launches
from ..drafts.problem import Problem, ProblemError
from ..search.search import Search

_SIZES = 32
_JUDGED = 3
"""Thresholds that the timeline judges, of those that are estimated to be best."""


def none(problem: Problem) -> Plan:
    """The plan that averages every gradient in place."""
    return plan_of(problem, draft_of_launches(usual_launches(problem), Option()))


def all_(problem: Problem) -> Plan:
    """The fastest plan that uses one compressor wherever that is allowed; the plan of ``none`` without any."""
    plans = [uniform(problem, compressor) for compressor in problem.compressors if problem.users[compressor]]
    return fastest(problem, plans)


def uniform(problem: Problem, compressor: Compressor) -> Plan:
    """The plan that uses a compressor wherever it is allowed, each launch in one message by the default program.

    Raises:
        ProblemError: no tensor may use it.
    """
    compressor = unfitted(compressor)
    if compressor != Identity() and not problem.users.get(compressor):
        raise ProblemError(f"policy: no tensor may use {compressor}, so there is nothing to compress")
    program = problem.default_program(compressor)
    return plan_of(problem, draft_of_launches(usual_launches(problem), Option(program, compressor)))


def fastest(problem: Problem, plans: Sequence[Plan]) -> Plan:
    """The plan with the shortest step on the timeline, the first one of equals; of no plans ``none``."""
    return min(plans, key=problem.step_s) if plans else none(problem)


# -------------------------------------------------------------------- thresholds


def threshold(problem: Problem) -> Plan:
    """The fastest plan of those that compress all tensors from some number of elements on, with one compressor.

    Every size of a tensor is tried as the threshold; if there are many, first some of them, and then those between the
    neighbours of the best one. The other tensors of a launch are averaged in place, or travel in the messages of the
    compressed ones.
    """
    search, tensors, found = Search(problem), problem.trace.tensors, []
    for compressor in problem.compressors:
        sizes = sorted({tensors[number].numel for number in problem.users[compressor]})
        step = -(-len(sizes) // _SIZES)
        times = _times(search, compressor, sizes[::step])
        if step > 1:
            best = sizes.index(min(times, key=lambda least: times[least]))
            times |= _times(search, compressor, sizes[max(best - step, 0) : best + step])
        found += [(time, compressor.name, least, compressor) for least, time in times.items()]
    plans = [none(problem)]
    for _, _, least, compressor in sorted(found, key=lambda each: each[:3])[:_JUDGED]:
        plans.append(plan_of(problem, _apart(problem, compressor, least)))
        plans.append(_together(problem, compressor, least))
    return fastest(problem, plans)


def _times(search: Search, compressor: Compressor, sizes: Sequence[int]) -> dict[int, float]:
    """The estimated time with each threshold."""
    drafts = [_apart(search.problem, compressor, least) for least in sizes]
    return dict(zip(sizes, search.estimates(drafts), strict=True))


def _apart(problem: Problem, compressor: Compressor, least: int) -> Draft:
    """The draft in which tensors that are not compressed are averaged in place."""
    option = Option(problem.default_program(compressor), compressor)
    tensors, users, draft = problem.trace.tensors, problem.users[compressor], []
    for launch in usual_launches(problem):
        large = tuple(each for each in launch if each in users and tensors[each].numel >= least)
        small = tuple(each for each in launch if each not in users or tensors[each].numel < least)
        messages: LaunchDraft = (MessageDraft(small), MessageDraft(large, option))
        draft.append(tuple(message for message in messages if message.tensors))
    return tuple(draft)


def _together(problem: Problem, compressor: Compressor, least: int) -> Plan:
    """The plan in which tensors that are not compressed travel in the messages of the others of their launch."""
    tensors = problem.trace.tensors
    allowed = {tensors[each].name: (compressor,) for each in problem.users[compressor] if tensors[each].numel >= least}
    option = Option(problem.default_program(compressor), compressor)
    draft = draft_of_launches(usual_launches(problem), option)
    exact = tuple(
        launch
        if any(tensors[each].name in allowed for each in launch[0].tensors)
        else (MessageDraft(launch[0].tensors),)
        for launch in draft
    )
    return plan_of(replace(problem, allowed=allowed), exact)
