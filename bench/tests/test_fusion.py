"""Fusion finds the best of all groups, whatever it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rivals.cupcake import FusionCosts, within_runs
from bench.rivals.fusion import best_groups, best_groups_of_any, encode_table, group_time


def every_way(backward_s, encode_s, send_s):
    """The least time over all groups, all of them computed at once: bit ``i`` of a number is a cut behind ``i``."""
    num = len(backward_s)
    ways = np.arange(1 << (num - 1))
    start, encoded_s, sent_s = np.zeros_like(ways), np.zeros(len(ways)), np.zeros(len(ways))
    for last in range(num):
        encoded_s = encoded_s + backward_s[last]
        cut = (ways >> last & 1 == 1) | (last == num - 1)
        after_s = encoded_s + encode_s[start, last + 1]
        sent_s = np.where(cut, np.maximum(sent_s, after_s) + send_s[start, last + 1], sent_s)
        encoded_s, start = np.where(cut, after_s, encoded_s), np.where(cut, last + 1, start)
    return float(sent_s.min())


def instance(rng, num):
    """Times of backward and sizes, a constant and a rate of encoding and of sending."""
    backward_s, sizes = rng.exponential(1e-3, num), 10 ** rng.uniform(3, 7, num)
    fixed_s, each_s = rng.uniform(0, 2e-3) * (rng.random() < 0.9), sizes * rng.uniform(0, 1e-9)
    send_s = encode_table(rng.uniform(1e-5, 2e-3), sizes * rng.uniform(1e-11, 3e-9))
    return backward_s, fixed_s, each_s, send_s


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        backward_s, fixed_s, each_s, send_s = instance(rng, int(rng.integers(1, 13)))
        encode_s = encode_table(fixed_s, each_s)
        found = best_groups(backward_s, fixed_s, each_s, send_s)
        assert found.step_s == pytest.approx(every_way(backward_s, encode_s, send_s), rel=1e-12)
        assert found.step_s == pytest.approx(group_time(backward_s, encode_s, send_s, found.ends), rel=1e-12)
        assert found.ends[-1] == len(backward_s) and list(found.ends) == sorted({*found.ends})
        for below_s in (0.9 * found.step_s, found.step_s):
            assert best_groups(backward_s, fixed_s, each_s, send_s, below_s) is None
        assert best_groups(backward_s, fixed_s, each_s, send_s, 1.001 * found.step_s) == found


@pytest.mark.parametrize("seed", range(2))
def test_groups_are_the_best_of_those_that_are_allowed(seed):
    """A group has gradients of one dtype."""
    rng = np.random.default_rng(seed)
    for _ in range(75):
        backward_s, fixed_s, each_s, send_s = instance(rng, int(rng.integers(2, 13)))
        send_s = within_runs(send_s, np.cumsum(rng.random(len(backward_s)) < 0.3))
        encode_s = encode_table(fixed_s, each_s)
        best_s = every_way(backward_s, encode_s, send_s)
        assert best_groups(backward_s, fixed_s, each_s, send_s).step_s == pytest.approx(best_s, rel=1e-12)
        assert best_groups_of_any(backward_s, encode_s, send_s).step_s == pytest.approx(best_s, rel=1e-12)


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
@pytest.mark.parametrize("seed", range(2))
def test_groups_are_the_best_of_all_for_any_times(seed, tolerance):
    """Encoding in a cache is faster, and sending has steps."""
    rng = np.random.default_rng(seed)
    for _ in range(75):
        backward_s, fixed_s, each_s, send_s = instance(rng, int(rng.integers(1, 13)))
        encode_s = encode_table(0.0, each_s)
        encode_s = fixed_s + encode_s + np.maximum(encode_s - np.median(np.abs(encode_s)), 0.0)
        send_s = send_s + np.floor(np.maximum(send_s, 0.0) / 1e-3) * 2e-4
        best_s = every_way(backward_s, encode_s, send_s)
        found = best_groups_of_any(backward_s, encode_s, send_s, tolerance)
        assert found.step_s == pytest.approx(group_time(backward_s, encode_s, send_s, found.ends), rel=1e-12)
        assert best_s * (1 - 1e-12) <= found.step_s <= best_s * (1 + tolerance + 1e-12)


def test_both_searches_agree_on_many_gradients():
    backward_s, fixed_s, each_s, send_s = instance(np.random.default_rng(5), 60)
    exact = best_groups(backward_s, fixed_s, each_s, send_s)
    of_any = best_groups_of_any(backward_s, encode_table(fixed_s, each_s), send_s)
    assert of_any.step_s == pytest.approx(exact.step_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_no_groups_of_many_gradients_are_found_only_if_none_are_fast_enough(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        given = instance(rng, int(rng.integers(65, 120)))
        found = best_groups(*given)
        assert best_groups(*given, 1.0001 * found.step_s) == found
        assert best_groups(*given, 0.9999 * found.step_s) is None


def test_forbidden_groups_are_not_made():
    send_s = encode_table(1.0, np.ones(4))
    send_s[:2, 3:] = np.inf  # the first two are of another dtype
    found = best_groups(np.zeros(4), 0.0, np.zeros(4), send_s)
    assert 2 in found.ends and found.step_s == 6.0


def test_free_encoding_is_not_worth_a_group_that_costs_a_latency():
    assert best_groups(np.array([1.0, 1.0]), 0.0, np.zeros(2), encode_table(2.0, np.array([0.5, 0.5]))).ends == (2,)
    assert best_groups(np.array([1.0, 1.0]), 0.0, np.zeros(2), encode_table(0.1, np.array([0.5, 0.5]))).ends == (1, 2)


@pytest.mark.parametrize("seed", range(3))
def test_no_groups_are_faster_than_the_bound(seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
        num = int(rng.integers(1, 12))
        backward_s, (encode_s, send_s) = rng.exponential(1e-3, num), rng.exponential(1e-3, (2, num))
        fixed_s, latency_s = rng.exponential(1e-3, 2)
        costs = FusionCosts(backward_s, fixed_s, encode_s, latency_s, send_s, 0.0, np.zeros(num))
        assert costs.bound_s <= costs.groups().step_s * (1 + 1e-12)
