"""Proposals of plans: what is worth a trial, although prices are uncertain; and their way to all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gckernels import BlockQuant, Cast16, Codec, EFSignSGD, Identity
from gckernels.sync.communication.agreement import Failure, together
from gckernels.sync.planner.choice import Row
from gckernels.sync.planner.machines.machine import MachineError
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.plans.units import UnitPlan
from gckernels.sync.predictive import measuring, planning
from gckernels.sync.predictive.planning import HOPELESS, Proposal, choice_of, finalists, proposal, proposed
from gckernels.sync.programs.named import ALLGATHER, ALLREDUCE, PARAMETER_SERVER
from gckernels.sync.traces.model_trace import Trace, TracedTensor
from gckernels.sync.tuning.trials.rules import stages_of
from machines import measured_machine
from models import build
from planning import problem_of
from ranks import run_ranks, values_of
from tunings import proposal_of
from workloads import thinned

SAFE, EXACT = stages_of("safe")[0], stages_of("exact")[0]


def trace() -> Trace:
    tensors = tuple(TracedTensor(f"t{at}", 1 << 20, 1e-3 * at, (1024, 1024)) for at in range(4))
    return Trace("model", tensors, 3e-3, 1e-3, buckets=(("t0", "t1"), ("t2", "t3")))


@pytest.mark.parametrize("frontend", list(Frontend))
def test_uncertain_prices_do_not_prevent_a_trial(frontend):
    found = proposal(trace(), measured_machine(0.5), frontend, SAFE)
    best = found.finalists[0]
    assert best.prediction.step_s < best.prediction.none_s == found.none_s
    assert any(unit.compressor == BlockQuant(bits=4) for unit in best.units)
    assert any("error 50%" in note for note in found.notes)
    assert any("Cast16 was not measured" in note for note in found.notes)


@pytest.mark.parametrize(
    ("missing", "frontend"), thinned(itertools.product(["AllGather", "AllToAll"], Frontend), len(Frontend) + 1)
)
def test_a_missing_price_takes_away_its_options_only(frontend, missing):
    """The policy auto still finds its plan, through the other collectives."""
    whole = measured_machine(0.01)
    parts = replace(whole, collectives=tuple(each for each in whole.collectives if each.step != missing))
    before, found = (proposal(trace(), machine, frontend, SAFE) for machine in (whole, parts))
    best = found.finalists[0]
    assert best.prediction.policy == "auto" and best.prediction.step_s < best.prediction.none_s == before.none_s
    programs = {step for plan in found.finalists for unit in plan.units for step in map(str, unit.program)}
    assert programs and not any(missing in step for step in programs)


def test_without_a_price_of_averaging_there_is_no_plan():
    whole = measured_machine(0.01)
    parts = replace(whole, collectives=whole.collectives[1:])
    with pytest.raises(MachineError, match="AllReduce"):
        proposal(trace(), parts, Frontend.DDP, SAFE)


def test_nothing_is_tried_that_is_hopeless():
    found = proposal(trace(), measured_machine(0.01, latency_s=1.0), Frontend.DDP, SAFE)
    assert all(plan.prediction.step_s <= HOPELESS * found.none_s for plan in found.finalists)


def test_an_exact_rule_compresses_nothing():
    found = proposal(trace(), measured_machine(0.01), Frontend.MODULE, EXACT)
    assert {unit.compressor.name for plan in found.finalists for unit in plan.units} <= {"Identity"}


@pytest.mark.parametrize("frontend", list(Frontend))
def test_finalists_are_of_different_kinds_and_the_fastest_comes_first(frontend, monkeypatch):
    monkeypatch.setattr(planning, "MUCH", 0.0)
    compressors = (BlockQuant(bits=4), EFSignSGD(), Cast16())
    choice = choice_of(problem_of(trace(), frontend, compressors, link_nbytes_per_s=1e7))
    plans = finalists(choice)
    predicted_s = [plan.prediction.step_s for plan in plans]
    assert len(plans) == len(compressors) and predicted_s == sorted(predicted_s)
    chosen = [{unit.compressor for unit in plan.units} for plan in plans]
    assert chosen[0] != chosen[1] != chosen[2]
    compressing = [row for row in choice.rows if any(not unit.in_place for unit in row.plan.units)]
    assert predicted_s[0] == min(row.step_s for row in compressing)
    for plan in plans:
        (row, *_) = [row for row in compressing if row.plan == plan]
        assert (plan.prediction.step_s, plan.prediction.error) == (row.step_s, row.error)


def test_where_much_is_gained_the_plan_of_one_compressor_for_everything_is_tried_too():
    rows = [("none", 1.0, Cast16()), ("auto", 0.2, EFSignSGD()), ("all", 0.3, EFSignSGD()), ("cupcake", 0.4, Cast16())]
    for gain, expected in ((1.0, ["auto", "all", "cupcake"]), (0.2, ["auto", "cupcake"])):
        choice = mock.Mock()
        choice.rows = [
            Row(policy, of_units(policy, method), 1.0 - gain * (1.0 - step_s), 0.0, 0.1, 0.0)
            for policy, step_s, method in rows
        ]
        choice.none, choice.plan = choice.rows[0], next(iter(proposal_of(build("Mlp"), {"a": "Cast16"}, 2).finalists))
        assert [plan.prediction.policy for plan in finalists(choice)] == expected


def of_units(policy: str, method: Codec) -> Plan:
    """A plan that differs from those of other policies in its programs, and compresses nothing for ``none``."""
    program = ALLGATHER if policy != "all" else PARAMETER_SERVER
    coded = UnitPlan("a", 4096, method, program, feedback=True)
    return Plan((UnitPlan("a", 4096, Identity(), ALLREDUCE, False) if policy == "none" else coded,))


def test_a_proposal_survives_its_text():
    made = proposal_of(build("Mlp"), {"four": "BlockQuant(bits=4)"}, world_size=2)
    made = dataclasses.replace(made, notes=("one", "two"), found_s=0.25)
    read = Proposal.from_text(made.to_text())
    assert read == made and read.finalists[0].prediction == made.finalists[0].prediction


def exchanged(fault):
    module, group, device = build("Mlp"), dist.distributed_c10d._get_default_group(), torch.device("cpu")
    parameters, rank = dict(module.named_parameters()), dist.get_rank()

    def propose():
        if fault == "proposal":
            raise ValueError("no plan")
        other = module if fault != "model" else build("Zoo")
        return proposal_of(other, {"rank 0": "BlockQuant"})

    def breaks(text):
        raise ValueError("cannot be read")

    def fitted(plan):
        plan.check(parameters.items(), 2)
        exact = [replace(unit, compressor=Identity(), program=ALLREDUCE, feedback=False) for unit in plan.units]
        left = {"one unit": 1, "no unit": len(exact)}.get(fault, 0)
        return plan.with_units((*exact[:left], *plan.units[left:]))

    broken = fault == "reading" and rank == 1
    with mock.patch.object(Proposal, "from_text", breaks if broken else Proposal.from_text):
        found = proposed(group, device, fitted, propose if rank == 0 else lambda: 1 / 0)
    alive = together(group, device, lambda: "alive")  # the ranks are still in step
    return (found.text if isinstance(found, Failure) else found.to_text()), alive


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("nothing", "rank 0"),
        ("proposal", "ValueError: no plan (rank 0)"),
        ("model", "plan does not fit the model"),
        ("reading", "cannot be read (rank 1)"),
    ],
)
def test_all_ranks_get_the_proposal_or_none(fault, expected):
    first, second = values_of(run_ranks(2, exchanged, fault))
    assert first == second and expected in first[0] and first[1] == "alive"


def test_plans_are_tried_as_they_will_run():
    """With a budget of memory they may compress less, or nothing."""
    (one, _), (none, _) = (values_of(run_ranks(2, exchanged, fault))[0] for fault in ("one unit", "no unit"))
    (plan,) = Proposal.from_text(one).finalists
    assert [unit.in_place for unit in plan.units][:2] == [True, False] and plan.prediction is None
    assert Proposal.from_text(none).finalists == ()


def profiled_again() -> list[tuple[bool, object]]:
    """Whether the profiles of some groups are new, and which they are. None is complete enough to be kept."""
    numbers, cpu, found = itertools.count(), torch.device("cpu"), []

    def measured(*_, progress, **__):
        progress(0.0, "all of it")
        return next(numbers)

    with mock.patch.object(measuring, "measured_or_kept", measured):
        for group in (dist.group.WORLD, dist.new_group()):
            for methods in ([Cast16(), EFSignSGD()], [Cast16()], [BlockQuant()]):
                found.append(measuring.measured_profile(group, cpu, methods))
    return [(each.is_new, each.profile) for each in found]


def test_a_profile_of_a_group_is_measured_once_in_a_process():
    expected = [(True, 0), (False, 0), (True, 1), (True, 2), (False, 2), (True, 3)]
    assert values_of(run_ranks(2, profiled_again)) == [expected] * 2


def profiled(where):
    group, device = dist.distributed_c10d._get_default_group(), torch.device("cpu")

    def fails(*_, **__):
        raise OSError("no measurement")

    broken = mock.patch.object(measuring, "measured_or_kept", fails)
    with broken if dist.get_rank() == where else contextlib.nullcontext():
        found = measuring.measured_profile(group, device, (), cache=False)
    alive = together(group, device, lambda: "alive")
    return isinstance(found, Failure), alive


@pytest.mark.slow
def test_no_rank_waits_for_a_profile_that_another_one_cannot_measure():
    assert values_of(run_ranks(2, profiled, 1, group_timeout_s=20.0)) == [(True, "alive")] * 2
