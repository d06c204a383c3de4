"""Rounds of training steps, whose updates are averaged, on the timeline of a bare module."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import gckernels
from gckernels.planner.choice import choose
from gckernels.planner.drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.drafts.rounds import UpdateRounds
from gckernels.planner.machines.files import load_machine
from gckernels.planner.machines.machine import Machine
from gckernels.planner.machines.scaling import scaled
from gckernels.planner.policies.baselines import uniform
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.plans.buckets import UPDATE_BUCKET_NBYTES
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.programs.named import ALLGATHER, ALLTOALL
from gckernels.sync.programs.sizes import unit_sent_nbytes
from gckernels.sync.programs.steps import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from predictions import RatedMachine

SIGNS = gckernels.from_spec("EFSignSGD(block=1024, magnitude='projection')")


def trace_of_step(numel: int = 1 << 20) -> ModelTrace:
    """A step of 0.17 s: forward of 0.06, backward of 0.1 and an optimizer of 0.01 s."""
    tensors = tuple(TracedTensor(f"t{number}", numel, 0.025 * number, (numel,)) for number in range(4))
    return ModelTrace("m", tensors, backward_s=0.1, forward_s=0.06, optimizer_s=0.01)


def problem_of_rounds(step: ModelTrace, machine: Machine, every: int, delay: int = 0) -> Problem:
    rounds = UpdateRounds(step, every, delay)
    allowed = allowed_compressors(rounds.trace, [SIGNS])
    allowed = allowed | {each.name: (SIGNS,) for each in step.tensors}  # vectors here, so that sizes are simple
    return Problem(rounds.trace, Pricer(machine), Frontend.MODULE, allowed, rounds=rounds)


def rated(element_s: float = 0.0, link_s: float = 1e-8) -> RatedMachine:
    return RatedMachine(link_s=link_s, latency_s=1e-3, element_s=dict.fromkeys(Place, element_s))


# -------------------------------------------------------------------- buckets


def test_updates_are_planned_in_buckets_of_the_front_ends_size():
    numel = UPDATE_BUCKET_NBYTES // 16
    step = ModelTrace("m", tuple(TracedTensor(f"t{number}", numel, 0.0, (numel,)) for number in range(8)), 0.1)
    problem = problem_of_rounds(step, rated(), 2)
    gradients = replace(problem, trace=step, rounds=None)
    assert usual_launches(problem) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert usual_launches(gradients) == (tuple(range(8)),)


# -------------------------------------------------------------------- time


@pytest.mark.parametrize("program", [None, ALLGATHER, ALLTOALL])
@pytest.mark.parametrize(("every", "delay"), [(1, 0), (1, 1), (7, 0), (7, 2), (7, 7), (500, 3)])
def test_a_step_takes_its_computing_and_its_part_of_the_round_that_is_not_hidden(every, delay, program):
    """Without computing, a step is the round alone: all gradients are ready at once."""
    step = trace_of_step(1 << 22 if program is None else 1 << 20)
    option = Option() if program is None else Option(program, SIGNS)
    at_once = tuple(replace(each, ready_s=0.0) for each in step.tensors)
    idle = ModelTrace("m", at_once, backward_s=0.0)
    alone = replace(problem_of_rounds(step, rated(), 1), trace=idle, rounds=None)
    plan = plan_of(alone, draft_of_launches(usual_launches(alone), option))
    round_s = alone.step_s(plan)
    predicted_s = problem_of_rounds(step, rated(), every, delay).step_s(plan)
    assert round_s > 0 and predicted_s / every == pytest.approx(0.17 + max(0.0, round_s - delay * 0.17) / every)


def test_what_is_computed_in_a_delay_shares_the_device_with_encodings():
    step, machine = trace_of_step(), rated(element_s=1e-8)
    times = []
    for delay in (0, 1, 2):
        problem = problem_of_rounds(step, machine, 2, delay)
        times.append(problem.step_s(uniform(problem, SIGNS)))
    codecs_s = 3 * 4 * 2**20 * 1e-8  # each element is encoded once, and decoded from two ranks
    assert times[0] >= times[1] >= times[2] == pytest.approx(2 * 0.17 + codecs_s, rel=0.05)


def test_launches_do_not_wait_for_gradients():
    problem = problem_of_rounds(trace_of_step(1 << 22), rated(), 3, 1)
    found = problem.timeline(uniform(problem, SIGNS))
    assert len(found.launches) > 1 and {launch.ready_s for launch in found.launches} == {0.0}


def test_the_search_finds_what_saves_most_of_a_round():
    """With a delay that hides a round of signs, an exact one is still on its way."""
    machine = rated(link_s=3e-8)
    choices = [choose(problem_of_rounds(trace_of_step(), machine, 4, delay)) for delay in (0, 1)]
    for choice in choices:
        assert choice.pays and choice.plan.made_for is Frontend.MODULE
        assert {unit.compressor for unit in choice.plan.units} == {SIGNS}
    assert choices[1].row.step_s == pytest.approx(4 * 0.17, rel=1e-3) and choices[1].none.step_s > 4.5 * 0.17


# -------------------------------------------------------------------- the trace of a round


def test_the_trace_of_a_round_has_all_its_computing():
    step = trace_of_step()
    for every, delay in ((1, 0), (5, 0), (5, 2), (5, 5)):
        trace = UpdateRounds(step, every, delay).trace
        assert trace.computing_s == pytest.approx(every * step.computing_s)
        assert trace.backward_s == pytest.approx(delay * step.computing_s)
    assert trace.model == "m, rounds of 5 steps with a delay of 5"


def test_updates_of_parameters_with_16_bits_have_32():
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    tensors = tuple(TracedTensor(str(dtype), 64, 0.0, dtype=dtype) for dtype in dtypes)
    trace = UpdateRounds(ModelTrace("m", tensors, 0.1), 1).trace
    assert [each.dtype for each in trace.tensors] == [torch.float32] * 3 + [torch.float64]


@pytest.mark.parametrize(
    ("every", "delay", "name"), [(0, 0, "every"), (2.0, 0, "every"), (2, -1, "delay"), (2, 3, "delay")]
)
def test_wrong_rounds_are_refused(every, delay, name):
    with pytest.raises(ValueError, match=f"^{name}: must be an integer from "):
        UpdateRounds(trace_of_step(), every, delay)


def test_rounds_are_for_bare_modules():
    problem = problem_of_rounds(trace_of_step(), rated(), 1)
    with pytest.raises(ValueError, match="rounds are for bare modules, got ddp"):
        replace(problem, frontend=Frontend.DDP)


# -------------------------------------------------------------------- more ranks

FLAT = 1.4
"""The factor within which 64 ranks send as many bytes each, and take as long, as 4 ranks."""


def costs(plan: Plan, problem: Problem) -> tuple[float, float]:
    """The bytes that a rank sends in a round, and its predicted seconds."""
    dtype, topology = torch.float32, problem.topology
    sent = (unit_sent_nbytes(unit.program, unit.numel, dtype, unit.compressor, topology) for unit in plan.units)
    return sum(sent), problem.step_s(plan)


@pytest.mark.parametrize("bit_per_s", [2e7, 2e8])
def test_programs_of_two_phases_cost_the_same_on_any_number_of_ranks(bit_per_s):
    """A rank sends its payloads once to be added up and once as a mean. Gathers send them to each rank."""
    two_phases, gathered = [], []
    for ranks in (2, 4, 8, 16, 32, 64):
        machine = scaled(load_machine("lab"), machines=ranks, bandwidth_bit_per_s=bit_per_s)
        problem = problem_of_rounds(trace_of_step(1 << 22), machine, 2)
        launches = usual_launches(problem)
        for costs_of, program in ((two_phases, ALLTOALL), (gathered, ALLGATHER)):
            costs_of.append(costs(plan_of(problem, draft_of_launches(launches, Option(program, SIGNS))), problem))
        assert ranks == 2 or {unit.program for unit in uniform(problem, SIGNS).units} == {ALLTOALL}
    for at_4, at_64 in zip(two_phases[1], two_phases[-1], strict=True):
        assert at_4 <= at_64 <= FLAT * at_4
    assert all(few <= many for few, many in pairwise(two_phases))
    assert gathered[-1][0] > 20 * gathered[1][0] and gathered[-1][1] > 2 * two_phases[-1][1]
