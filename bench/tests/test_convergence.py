"""Test that every compressor, at its default setting, trains a small network on real data as well as plain DDP."""

from __future__ import annotations

import statistics

import pytest
import torch

import gckernels
from ranks import run_ranks, values_of

MODEL = "digits"


def accuracy(spec: str, seed: int) -> float:
    """The accuracy after training on two ranks, which is the same on both."""
    from bench.training.recipes import (
        train_once,  # imported late: it needs scikit-learn, which a machine that runs the GPU tests may lack
    )

    first, second = values_of(run_ranks(2, train_once, MODEL, spec, seed, torch.device("cpu"), timeout_s=300))
    assert first.accuracy == second.accuracy  # the ranks have the same network
    return first.accuracy


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_compressor_reaches_the_accuracy_of_no_compression():
    from bench.training.margins import margin_of, worse_by
    from bench.training.recipes import PLAIN, SEEDS

    specs = [PLAIN, *sorted(gckernels.COMPRESSORS)]
    means = {spec: statistics.fmean(accuracy(spec, seed) for seed in SEEDS) for spec in specs}
    print("accuracy:", {spec: round(mean, 4) for spec, mean in means.items()})
    assert means[PLAIN] > 0.97
    worse = {spec: worse_by(MODEL, means[spec], means[PLAIN]) for spec in specs}
    # not `>`, which NaN would pass
    assert {spec: by for spec, by in worse.items() if not by <= margin_of(MODEL, spec, len(SEEDS))} == {}
