"""The policy ``espresso``: an option of Espresso's tree for every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gckernels.compressor import Compressor

from ...plans.plan import Plan
from ...programs.enumeration import enumerate_programs
from ...programs.named import ALLREDUCE
from ...programs.steps import Coding, Encode, Place, Program
from ..drafts import Draft, MessageDraft, Option, plan_of
from ..option_tables import Launches, lane_times, option_table, usable
from ..problem import Problem
from .espresso_search import choose_options, offload


def espresso(problem: Problem) -> Plan:
    """The plan of Espresso's two algorithms: options by size; then, if the problem has the host, what moves there.

    A synchronizer launches every tensor alone. DDP launches its buckets, which take the place of tensors. Methods that
    send factors are not in Espresso's tree, and are not used. Algorithms compare times on lanes, which share nothing
    but their total work. So the timeline decides whether moving anything to the host has made the step faster.
    """
    launches = problem.buckets or tuple((tensor,) for tensor in range(len(problem.trace.tensors)))
    numels = [sum(problem.trace.tensors[tensor].numel for tensor in launch) for launch in launches]
    chosen = best_options(problem, launches, numels, _options(problem))
    plan = plan_of(problem, _draft(launches, chosen))
    if Place.HOST not in problem.places:
        return plan
    moved = plan_of(problem, _draft(launches, offloaded(problem, launches, numels, chosen)))
    return min(plan, moved, key=problem.step_s)


def _draft(launches: Launches, options: Sequence[Option]) -> Draft:
    return tuple((MessageDraft(launch, option),) for launch, option in zip(launches, options, strict=True))


def best_options(
    problem: Problem, launches: Launches, numels: Sequence[int], options: Sequence[Option]
) -> list[Option]:
    """The option of each launch by Algorithm 1.

    It starts from that option for all launches which is the fastest of those that compress nothing.
    """
    table, may_use = option_table(problem, launches, options), usable(problem, launches, options)
    exact = [option.compressor is None for option in options]
    starts = [index for index, is_exact in enumerate(exact) if is_exact and may_use[:, index].all()]
    times = min(
        (lane_times(problem, launches, table, [start] * len(launches)) for start in starts), key=lambda t: t.step_s()
    )
    choose_options(times, numels, may_use)
    return [options[option] for option in times.choice]


def offloaded(problem: Problem, launches: Launches, numels: Sequence[int], chosen: Sequence[Option]) -> list[Option]:
    """The options with some of the compression on the host, by Algorithm 2."""
    used = list(dict.fromkeys(chosen))
    moved = [index for index, option in enumerate(used) if option.compressor is not None]
    options = [*used, *(replace(used[index], program=on_host(used[index].program)) for index in moved)]
    table = option_table(problem, launches, options)
    times = lane_times(problem, launches, table, [used.index(option) for option in chosen])
    offload(times, numels, {index: len(used) + place for place, index in enumerate(moved)})
    return [options[option] for option in times.choice]


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
        if isinstance(compressor, Compressor):
            programs = enumerate_programs(problem.topology, summable=compressor.traits.summable)
            encoded += [Option(program, compressor) for program in programs if _encodes(program)]
    return [*exact, *encoded]


def _encodes(program: Program) -> bool:
    return any(isinstance(step, Encode) for step in program)
