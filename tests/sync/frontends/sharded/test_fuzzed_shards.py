"""Random trainings of FSDP2 and HSDP compute with the parameters of FSDP, and give its gradients or keep the rest."""

from __future__ import annotations

import pytest

import fuzzed_shards
from workloads import thinned

SEEDS = range(24)


@pytest.mark.parametrize("seed", thinned([(seed,) for seed in SEEDS], 24))
def test_outputs_and_gradients_are_those_of_fsdp(seed):
    counts = fuzzed_shards.run(seed)
    assert "fails alone" in counts or (counts["microbatches"] >= 8 and counts["checks"])
