"""Machines of papers reproduce the published iteration times to which their numbers were fitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.machines.machine import Machine
from gckernels.planner.machines.scaling import scaled
from gckernels.planner.policies.baselines import none
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace


def iteration_s(machine: Machine, model: str, computing_s: float) -> float:
    """The predicted iteration without compression, of a model that computes for ``computing_s`` on one device."""
    trace = ModelTrace.load(model)
    trace = replace(trace, forward_s=computing_s - trace.backward_s)
    problem = Problem(trace, Pricer(machine), Frontend.MODULE)
    return problem.step_s(none(problem))


@pytest.mark.parametrize(
    ("name", "model", "published_s", "computing_s", "error"),
    [
        ("espresso-nvlink", "bert", 0.505, 0.258, 0.15),
        ("espresso-nvlink", "gpt2", 0.757, 0.439, 0.15),
        ("espresso-pcie", "vgg16", 0.613, 0.140, 0.10),
        ("espresso-pcie", "lstm", 0.520, 0.239, 0.10),
    ],
)
def test_iterations_without_compression_take_as_long_as_published(name, model, published_s, computing_s, error):
    """Espresso, 64 devices. Computing takes the published scaling factor of the iteration; for VGG-16, of which there
    is none, a little less than the published bound."""
    assert iteration_s(load_machine(name), model, computing_s) == pytest.approx(published_s, rel=error)


def test_a_faster_network_helps_until_software_or_computing_is_the_limit():
    machine = load_machine("utility-p3-8xlarge")
    rates = (1e9, 1e10, 1e11, 1e12)
    steps = [iteration_s(scaled(machine, bandwidth_bit_per_s=rate), "resnet50", 0.122) for rate in rates]
    assert steps == sorted(steps, reverse=True) and len({*steps}) == len(steps)
    assert steps[0] > 4 * steps[1] and steps[-1] < 0.15
