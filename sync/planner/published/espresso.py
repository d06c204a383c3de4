"""The policy ``espresso``: an option of Espresso's tree for every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gckernels.codec import Codec

from ...plans.plan import Plan
from ...programs.enumeration import enumerate_programs
from ...programs.named import ALLREDUCE
from ...programs.steps import Coding, Encode, Place, Program
from ..drafts.drafts import Draft, Launches, MessageDraft, Option, draft_of_launches, plan_of
from ..drafts.problem import Problem
from ..maxplus.changes import Changes
from ..search.search import Search
from .espresso_search import choose_options, offload


def espresso(problem: Problem) -> Plan:
    """The plan of Espresso's two algorithms: options by size; then, if the problem has the host, what moves there.

    A bare module launches every tensor alone. DDP launches its buckets, which take the place of tensors. Methods that
    send factors are not in Espresso's tree, and are not used. The algorithms compare estimates. So the timeline decides
    whether moving anything to the host has made the step faster.
    """
    launches = problem.buckets or tuple((tensor,) for tensor in range(len(problem.trace.tensors)))
    numels = [sum(problem.trace.tensors[tensor].numel for tensor in launch) for launch in launches]
    search = Search(problem)
    chosen = best_options(search, launches, numels, _options(problem))
    plan = plan_of(problem, _draft(launches, chosen))
    if Place.HOST not in problem.places:
        return plan
    moved = plan_of(problem, _draft(launches, offloaded(search, launches, numels, chosen)))
    return min(plan, moved, key=problem.step_s)


def _draft(launches: Launches, options: Sequence[Option]) -> Draft:
    return tuple((MessageDraft(launch, option),) for launch, option in zip(launches, options, strict=True))


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
    """All options on the device, first those that compress nothing."""
    exact, encoded = [Option(ALLREDUCE)], []
    for program in enumerate_programs(problem.topology):
        if not _encodes(program) and program != ALLREDUCE:
            exact.append(Option(program))
    for compressor in problem.compressors:
        if isinstance(compressor, Codec):
            programs = enumerate_programs(problem.topology, summable=compressor.traits.summable)
            encoded += [Option(program, compressor) for program in programs if _encodes(program)]
    return [*exact, *encoded]


def _encodes(program: Program) -> bool:
    return any(isinstance(step, Encode) for step in program)
