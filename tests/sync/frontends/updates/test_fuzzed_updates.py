"""Random trainings by averaged updates are those of local SGD, and the same on all ranks and from every state."""

from __future__ import annotations

import pytest

import fuzzed_updates
from workloads import thinned

SEEDS = range(24)


@pytest.mark.parametrize("seed", thinned([(seed,) for seed in SEEDS], 24))
def test_parameters_are_those_of_local_sgd_and_of_all_ranks(seed):
    counts = fuzzed_updates.run(seed)
    assert counts["steps"] >= 15 and counts["models"]
