"""Tests of the measurement of times to an accuracy, without links."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from bench.training import recipes, time_to_accuracy

CURVE = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (4.0, 0.95)]


@pytest.mark.parametrize(
    ("target", "higher", "found"),
    [(0.9, True, "2.50"), (0.95, True, "4.50"), (0.99, True, ""), (0.5, False, "1.50"), (0.1, False, "")],
)
def test_seconds_are_those_of_the_first_evaluation_that_is_good_enough(target, higher, found):
    assert time_to_accuracy.seconds_to(target, CURVE, 0.5, higher) == found
    diverged = [(1.0, math.nan)]
    assert time_to_accuracy.seconds_to(target, diverged, 0.5, higher) == ""


def test_every_seed_is_a_cell():
    given = {"networks": ["2"], "models": ["digits"], "rates": ["1gbit"], "seeds": [0, 1], "arms": ["plain"]}
    cells = time_to_accuracy.cells_of(argparse.Namespace(**given))
    assert [cell.columns["seed"] for cell in cells] == [0, 1]


def test_the_network_is_evaluated_between_steps():
    pytest.importorskip("sklearn", reason="needs the extra 'bench'")
    model = recipes.MODELS["digits"]
    network = model.build()
    timer = time_to_accuracy.Evaluated(model, network)
    state = torch.random.get_rng_state()
    for _ in range(timer.every + 1):
        with timer:
            pass
    ((seconds, metric),) = timer.curve
    assert seconds > 0 and 0 <= metric <= 1 and timer.cpu_s > 0
    assert torch.equal(torch.random.get_rng_state(), state)  # the data are those of any other training
    with torch.no_grad():
        next(network.parameters()).fill_(math.nan)
    assert math.isnan(time_to_accuracy.metric_of(model, network))
