"""The policy ``threshold``: tensors from some size on are compressed."""

from __future__ import annotations

from dataclasses import replace

from gckernels.method import Method

from ...plans.plan import Plan
from ...programs.named import default_program
from ..drafts import Draft, LaunchDraft, MessageDraft, Option, draft_of_launches, plan_of, usual_launches
from ..problem import Problem
from ..search import Search
from .none import none

_JUDGED = 3
"""Thresholds that the timeline judges, of those that are estimated to be best."""


def threshold(problem: Problem) -> Plan:
    """The fastest plan of those that compress all tensors from some number of elements on, with one compressor.

    Every size of a tensor is tried as the threshold. The other tensors of a launch are averaged in place, or travel in
    the messages of the compressed ones.
    """
    tried = [(compressor, least) for compressor in problem.compressors for least in _sizes(problem, compressor)]
    times = Search(problem).estimates([_apart(problem, compressor, least) for compressor, least in tried])
    best = sorted(range(len(tried)), key=times.__getitem__)[:_JUDGED]
    plans = [none(problem)]
    for compressor, least in (tried[at] for at in best):
        plans.append(plan_of(problem, _apart(problem, compressor, least)))
        plans.append(_together(problem, compressor, least))
    return min(plans, key=problem.step_s)


def _sizes(problem: Problem, compressor: Method) -> list[int]:
    """The sizes of the tensors that may use a compressor."""
    tensors = problem.trace.tensors
    return sorted({each.numel for each in tensors if compressor in problem.allowed.get(each.name, ())})


def _apart(problem: Problem, compressor: Method, least: int) -> Draft:
    """The draft in which tensors that are not compressed are averaged in place."""
    option = Option(default_program(compressor, problem.topology.world_size), compressor)
    tensors, draft = problem.trace.tensors, []
    for launch in usual_launches(problem):
        large = tuple(
            each
            for each in launch
            if tensors[each].numel >= least and compressor in problem.allowed.get(tensors[each].name, ())
        )
        small = tuple(each for each in launch if each not in large)
        messages: LaunchDraft = (MessageDraft(small), MessageDraft(large, option))
        draft.append(tuple(message for message in messages if message.tensors))
    return tuple(draft)


def _together(problem: Problem, compressor: Method, least: int) -> Plan:
    """The plan in which tensors that are not compressed travel in the messages of the others of their launch."""
    allowed = {
        tensor.name: (compressor,)
        for tensor in problem.trace.tensors
        if tensor.numel >= least and compressor in problem.allowed.get(tensor.name, ())
    }
    option = Option(default_program(compressor, problem.topology.world_size), compressor)
    draft = draft_of_launches(usual_launches(problem), option)
    exact = tuple(
        launch
        if any(problem.trace.tensors[each].name in allowed for each in launch[0].tensors)
        else (MessageDraft(launch[0].tensors),)
        for launch in draft
    )
    return plan_of(replace(problem, allowed=allowed), exact)
