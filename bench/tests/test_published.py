"""The measurement of published policies has a row for each, with distances to the others and to the least work."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import gckernels
from bench.lib.record import csv_path, read_csv
from bench.planner import published
from gckernels.sync.planner.machines.files import load_machine
from gckernels.sync.planner.policies import POLICIES
from gckernels.sync.planner.pricing import Pricer
from gckernels.sync.planner.problem import Problem
from gckernels.sync.planner.trace import Trace, TracedTensor
from gckernels.sync.plans.plan import Attached


def run(monkeypatch, *arguments: str) -> dict[tuple[str, str], dict[str, str]]:
    monkeypatch.setattr(sys, "argv", ["published", *arguments])
    published.main()
    return {(row["trace"], row["policy"]): row for row in read_csv(csv_path("policies", torch.device("cpu")))}


@pytest.mark.slow
def test_every_policy_has_a_row(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_OUT", str(tmp_path))
    cell = ("--machines", "espresso-pcie", "--traces", "lstm", "--compressors", "EFSignSGD", "--policies")
    rows = run(monkeypatch, *cell, "none", "all")
    assert set(rows) == {(trace, policy) for trace in ("lstm", "lstm" + published.FIRST) for policy in ("none", "all")}
    assert float(rows["lstm", "none"]["compressed"]) == 0.0 and float(rows["lstm", "all"]["compressed"]) == 1.0
    assert rows["lstm", "none"]["over_none"] == "1.0000" and rows["lstm", "none"]["over_bound"] == ""

    rows = run(monkeypatch, *cell, "cupcake")  # beside the rows of before
    ratio = float(rows["lstm", "cupcake"]["step_ms"]) / float(rows["lstm", "none"]["step_ms"])
    assert len(rows) == 6 and float(rows["lstm", "cupcake"]["over_none"]) == round(ratio, 4) < 0.5


def work_problem(tensors: tuple[TracedTensor, ...], backward_s: float, machine: str = "espresso-pcie") -> Problem:
    allowed = dict.fromkeys((tensor.name for tensor in tensors), (gckernels.EFSignSGD(),))
    trace = Trace("m", tensors, backward_s)
    return Problem(trace, Pricer(load_machine(machine)), Attached.SYNCHRONIZER, allowed)


@pytest.mark.parametrize("machine", ["espresso-pcie", "two-sites-1gbit"])
@pytest.mark.parametrize("seed", range(2))
def test_no_plan_is_faster_than_the_least_work(seed, machine):
    rng, ready_s, tensors = random.Random(seed), 0.0, []
    for number in range(4):
        ready_s += rng.choice((0.0, 1e-3, 1e-2))
        tensors.append(TracedTensor(f"t{number}", int(10 ** rng.uniform(3, 7.5)), ready_s))
    problem = work_problem(tuple(tensors), ready_s + rng.choice((0.0, 1e-2)), machine)
    least_s = published.least_work_s(problem)
    for policy in ("none", "all", "cupcake", "auto"):
        assert least_s <= problem.step_s(POLICIES[policy](problem)) * (1 + 1e-9)


def test_work_begins_when_gradients_are_ready():
    """The last gradient of a long backward is as much work as alone; while backward computes, nothing is sent."""
    last = TracedTensor("last", 1 << 25, 1.0)
    alone_s = published.least_work_s(work_problem((replace(last, ready_s=0.0),), 0.0))
    assert published.least_work_s(work_problem((last,), 1.0)) == pytest.approx(1.0 + alone_s)
    first = TracedTensor("first", 1 << 10, 0.0)
    assert published.least_work_s(work_problem((first, last), 1.0)) == pytest.approx(1.0 + alone_s)


def test_the_busiest_of_two_resources_works_as_little_as_the_best_mixture():
    """Half of the work with each option keeps both resources busy for 1.5 seconds."""
    work_s = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]])
    assert published.busiest_s(work_s) == pytest.approx(1.5, rel=0.01)
    assert published.busiest_s(work_s) <= 1.5
    assert published.busiest_s(work_s[:1]) == pytest.approx(2.0, rel=0.01)
