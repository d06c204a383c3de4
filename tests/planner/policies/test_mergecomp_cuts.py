"""MergeComp's search finds good cuts with few trials, and units are summed group by group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gckernels
from gckernels.planner.policies.mergecomp import best_cuts
from gckernels.planner.timeline.pricing import Units


def test_units_of_groups_are_summed_group_by_group():
    messages = [[10, 30], [], [30, 30, 10], [10]]
    units = Units.of(gckernels.Identity(), messages)
    assert units.numels == (10, 30)
    assert units.total([3, 5]).tolist() == [8.0, 0.0, 13.0, 3.0] and units.counts.tolist() == [2.0, 0.0, 3.0, 1.0]
    starts, stops = np.triu_indices(6)[0], np.triu_indices(6)[1] + 1  # all runs of the six units
    sizes = [size for message in messages for size in message]
    runs = [sizes[start:stop] for start, stop in zip(starts, stops, strict=True)]
    assert replace(units, starts=starts, stops=stops).total(units.numels).tolist() == [float(sum(run)) for run in runs]


class TestCuts:
    """MergeComp's search."""

    @pytest.mark.parametrize("best", [1, 2, 7, 50, 98, 99])
    def test_finds_the_lowest_point_of_a_valley(self, best):
        probed = []

        def step_s(cuts):
            probed.append(cuts)
            return 2.0 if not cuts else 1.0 + abs(cuts[0] - best) / 100

        assert abs(best_cuts(100, step_s)[0] - best) <= 1 and len(set(probed)) == len(probed) < 20

    def test_takes_the_best_that_it_has_seen_where_there_is_no_valley(self):
        seen = {}

        def step_s(cuts):
            return seen.setdefault(cuts, float(np.random.default_rng(sum(cuts)).random()))

        found = best_cuts(100, step_s)
        assert seen[found] == min(seen.values())

    def test_cuts_nothing_where_that_is_best(self):
        assert best_cuts(50, lambda cuts: float(len(cuts))) == ()
        assert best_cuts(1, lambda cuts: 1.0) == ()

    def test_stops_where_another_group_gains_little(self):
        times = {0: 1.0, 1: 0.5, 2: 0.49, 3: 0.1}
        assert len(best_cuts(40, lambda cuts: times[len(cuts)], max_groups=4)) == 2
        assert len(best_cuts(40, lambda cuts: times[len(cuts)], max_groups=4, min_gain=0.01)) == 3
        assert len(best_cuts(40, lambda cuts: times[len(cuts)], max_groups=2)) == 1

    def test_two_of_two_gradients_are_tried(self):
        assert best_cuts(2, lambda cuts: 1.0 - len(cuts) / 2) == (1,)
