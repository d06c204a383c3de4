"""Published systems on the testbeds of Espresso: which is faster comes out as published.

Only orders are tested. Throughputs were read off figures, and machines are described from a few published numbers. The
traces are those that Espresso's authors have published; ResNet-101 is not among them. ResNet-50 stands for it: it has
nearly as many bytes for each second of backward, and half as many tensors.

Espresso's authors compare it with HiPress' decisions for tensors that are launched one by one, so these are ``hipress``
here. The policy ``secopa`` may also send gradients together, as HiPress itself does, and is faster.

One order does not come out: with DGC, HiPress beats no compression on the stand-in for ResNet-101, which it does not
quite in Espresso's measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest

import gckernels
from gckernels.planner.choice import POLICIES, choose
from gckernels.planner.drafts.drafts import Option, plan_of, usual_launches
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.policies.messages import each_alone, uniform_draft
from gckernels.planner.policies.secopa import Exchange, by_option, option_choices, with_spread_roots
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import ALLTOALL, HIERARCHICAL, Place
from gckernels.sync.traces.model_trace import ModelTrace

NVLINK, PCIE = "espresso-nvlink", "espresso-pcie"
SIGN, DGC, RANDOM = "EFSignSGD", "DGC(ratio=0.01)", "RandomK(ratio=0.01)"
BOTH = (Place.DEVICE, Place.HOST)
slow = pytest.mark.slow


@functools.cache
def problem(machine: str, trace: str, spec: str, places: tuple[Place, ...] = BOTH) -> Problem:
    tensors = replace(ModelTrace.load(trace), forward_s=0.0)  # ratios below are of backward and synchronisation
    allowed = {tensor.name: (gckernels.from_spec(spec),) for tensor in tensors.tensors}
    return Problem(tensors, Pricer(load_machine(machine)), Frontend.MODULE, allowed, places)


def steps(cell: Problem, names: Sequence[str]) -> list[float]:
    """The predicted seconds of a step with the plan of each policy."""
    return [hipress_s(cell) if name == "hipress" else cell.step_s(POLICIES[name](cell)) for name in names]


def hipress_s(cell: Problem) -> float:
    """The seconds of a step with SeCoPa's decisions for tensors that are launched one by one."""
    choices = (choice for exchange in Exchange for choice in option_choices(cell, cell.compressors[0], exchange))
    drafts = (by_option(each_alone(cell), choice) for choice in choices)
    return min(cell.step_s(with_spread_roots(plan_of(cell, draft))) for draft in drafts)


@pytest.mark.parametrize(
    ("machine", "trace", "spec", "fastest_first"),
    [
        pytest.param(NVLINK, "bert", RANDOM, ("espresso", "hipress", "hitopkcomm", "none"), marks=slow),
        pytest.param(NVLINK, "gpt2", SIGN, ("espresso", "hipress", "hitopkcomm", "none"), marks=slow),
        (PCIE, "vgg16", RANDOM, ("espresso", "hipress", "hitopkcomm", "none", "byteps")),
        (PCIE, "lstm", SIGN, ("espresso", "hitopkcomm", "none", "byteps")),
        (PCIE, "resnet50", DGC, ("espresso", "hipress", "none", "hitopkcomm")),
    ],
)
def test_systems_are_in_the_published_order(machine, trace, spec, fastest_first):
    """Figures 11 and 12 of Espresso, where systems differ by more than 2 percent."""
    found = steps(problem(machine, trace, spec), fastest_first)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("machine", "trace", "spec", "published"),
    [
        pytest.param(NVLINK, "bert", RANDOM, 505 / 315, marks=slow),
        pytest.param(NVLINK, "gpt2", SIGN, 757 / 467, marks=slow),
        (PCIE, "vgg16", RANDOM, 613 / 167),
        (PCIE, "lstm", SIGN, 520 / 292),
    ],
)
def test_whole_steps_gain_as_much_as_published(machine, trace, spec, published):
    """Iterations of 64 devices without compression and with Espresso's plan. Without forward and optimizer, which come
    from the published bound, gains would be up to three times as large."""
    rest_s = ModelTrace.load(trace).forward_s
    espresso, none = steps(problem(machine, trace, spec), ("espresso", "none"))
    assert (none + rest_s) / (espresso + rest_s) == pytest.approx(published, rel=0.25)


@pytest.mark.parametrize(
    ("machine", "trace", "spec", "published_s"),
    [
        pytest.param(NVLINK, "bert", RANDOM, {"secopa": 0.445, "hitopkcomm": 0.492, "espresso": 0.315}, marks=slow),
        pytest.param(NVLINK, "gpt2", SIGN, {"secopa": 0.624, "hitopkcomm": 0.744, "espresso": 0.467}, marks=slow),
        pytest.param(PCIE, "vgg16", RANDOM, {"secopa": 0.258, "hitopkcomm": 0.292, "byteps": 0.758}, marks=slow),
        (PCIE, "lstm", SIGN, {"secopa": 0.520, "hitopkcomm": 0.512, "espresso": 0.292}),
    ],
)
def test_no_published_system_is_promised_to_be_faster_than_it_was(machine, trace, spec, published_s):
    """The published step is at most as long as the upper end of the range that is said beside the predicted one."""
    rest_s = ModelTrace.load(trace).forward_s
    for row in choose(problem(machine, trace, spec), "none", published_s).rows:
        if row.policy in published_s:
            assert published_s[row.policy] <= (row.step_s + rest_s) * (1.0 + row.margin)


@pytest.mark.parametrize("machine", [NVLINK, PCIE])
@pytest.mark.parametrize("trace", ["lstm", pytest.param("bert", marks=slow)])
def test_compression_on_the_processors_is_slower_than_on_devices(machine, trace):
    on_host, on_device, none = steps(problem(machine, trace, SIGN), ("byteps", "espresso", "none"))
    assert on_device < 0.7 * on_host
    assert on_host < 1.3 * none


@pytest.mark.parametrize("spec", [SIGN, DGC])
def test_compressing_everything_hurts_a_residual_network(spec):
    all_, none = steps(problem(PCIE, "resnet50", spec), ("hitopkcomm", "none"))
    assert all_ > 1.1 * none


@pytest.mark.parametrize("trace", ["vgg16", pytest.param("gpt2", marks=slow)])
def test_moving_some_compression_to_the_processors_helps(trace):
    on_device, both = (problem(NVLINK, trace, SIGN, places) for places in ((Place.DEVICE,), BOTH))
    (without,), (with_host,) = steps(on_device, ["espresso"]), steps(both, ["espresso"])
    assert with_host < 0.995 * without
    plan = POLICIES["espresso"](both)
    codings = [{step for step in unit.program if getattr(step, "place", None) == Place.HOST} for unit in plan.units]
    assert 0 < sum(map(bool, codings)) < len(plan.units)


@pytest.mark.parametrize("trace", ["vgg16", "lstm", pytest.param("gpt2", marks=slow)])
def test_levels_pay_where_devices_of_a_machine_have_fast_links(trace):
    """Adding up raw gradients inside a machine is cheap on NVLink, and is not on PCIe."""
    faster = {}
    for machine in (NVLINK, PCIE):
        cell = problem(machine, trace, SIGN)
        options = [Option(program, cell.compressors[0]) for program in (HIERARCHICAL, ALLTOALL)]
        levels, flat = (
            cell.step_s(plan_of(cell, uniform_draft(cell, usual_launches(cell), option))) for option in options
        )
        faster[machine] = levels < flat
    assert faster == {NVLINK: True, PCIE: False}


@pytest.mark.parametrize("machine", [NVLINK, PCIE])
@pytest.mark.parametrize(("trace", "spec"), [("resnet50", SIGN), pytest.param("bert", DGC, marks=slow)])
def test_merged_gradients_beat_one_launch_for_each(machine, trace, spec):
    """MergeComp, against launches of one gradient each."""
    alone, merged = steps(problem(machine, trace, spec), ("hitopkcomm", "mergecomp"))
    assert merged < 0.7 * alone


@slow
@pytest.mark.parametrize("machine", [NVLINK, PCIE])
@pytest.mark.parametrize("trace", ["vgg16", "bert"])
def test_espresso_is_better_than_simple_strategies(machine, trace):
    """Its ablation: without compression, with compression of everything, with decisions for each tensor alone."""
    espresso, *others = steps(problem(machine, trace, SIGN), ("espresso", "none", "hitopkcomm", "hipress"))
    assert espresso < min(others)
