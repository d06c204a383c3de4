"""Models of a dtype that no compressor takes: attached without a plan, they stay plain, and nothing is measured."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.tuning import tuning
from ranks import run_ranks, values_of


def decisions(attached: str) -> list[tuple[int, str]]:
    """The levels and texts of the decisions of a training."""
    module = torch.nn.Linear(8, 8).double()
    with mock.patch.object(tuning, "Tuner", None):  # nothing is tried in vain
        model = DistributedDataParallel(module) if attached == "ddp" else module
        handle = sync.attach(model)
        for _ in range(3):
            model(torch.ones(4, 8, dtype=torch.float64)).square().sum().backward()
        assert handle.steps == 3
        handle.close()
    return [(each.level, each.text) for each in handle.decisions]


@pytest.mark.parametrize("attached", ["ddp", "bare"])
def test_a_model_of_doubles_stays_plain_with_one_line_that_says_why(attached: str):
    for ((level, text),) in values_of(run_ranks(2, decisions, attached)):
        assert level == logging.WARNING and "the parameters have dtype float64, and compressors take" in text
