"""Random trainings, in which plans are found and changed, give the gradients of plain DDP or keep the rest of them."""

from __future__ import annotations

import pytest

import fuzzed_trainings
from workloads import thinned

SEEDS = range(24)


@pytest.mark.parametrize("seed", thinned([(seed,) for seed in SEEDS], 12))
def test_nothing_is_lost_and_ranks_stay_equal(seed):
    counts = fuzzed_trainings.run(seed)
    assert counts["steps"] >= 40 and counts["checks"]
