"""Fits: known coefficients come back from noisy times, and errors are those at held-out sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gckernels.planner.machines.curves import Coefficients
from gckernels.planner.profiling.measurements.fits import (
    CallCost,
    LaunchSample,
    averaged,
    coefficients_of,
    curve_of,
    non_negative_least_squares,
    quietest,
    rising,
    typical,
)

SIZES = [4096 << shift for shift in range(0, 13, 2)]
TRUE = Coefficients(
    5e-6, 2e-7, 4e-10, far_element_s=2e-10, source_unit_s=3e-7, source_element_s=1e-10, knee=float(SIZES[3])
)


def samples(true: Coefficients, noise: float, sources: tuple[int, ...] = (1, 2)) -> list[LaunchSample]:
    random = np.random.default_rng(0)
    made = []
    for elements, units, merged in itertools.product(SIZES, (1, 16, 128), sources):
        (seconds,) = true.seconds(np.array([float(units)]), np.array([float(elements)]), merged)
        made.append(LaunchSample(units, elements, merged, float(seconds) * float(random.normal(1.0, noise))))
    return made


# -------------------------------------------------------------------- codecs


def test_known_coefficients_come_back():
    found, error = coefficients_of(samples(TRUE, noise=0.0))
    assert found.knee == TRUE.knee
    assert vars(found) == pytest.approx(vars(TRUE), rel=1e-6, abs=1e-15)
    assert error == pytest.approx(0.0, abs=0.15)  # the sizes that are left have no knee where it is


def test_noise_of_a_few_percent_changes_the_large_coefficients_as_little():
    found, error = coefficients_of(samples(TRUE, noise=0.03))
    assert found.element_s == pytest.approx(TRUE.element_s, rel=0.1)
    assert found.unit_s == pytest.approx(TRUE.unit_s, rel=0.1)
    assert found.launch_s == pytest.approx(TRUE.launch_s, rel=0.1)
    assert error is not None and 0.0 < error < 0.1


def test_coefficients_are_never_negative():
    falling = [LaunchSample(1, elements, 1, 1e-3 / (index + 1)) for index, elements in enumerate(SIZES)]
    found, error = coefficients_of(falling)
    assert min(vars(found).values()) >= 0.0
    assert error is not None and error > 0.2  # such times are refused


def test_the_error_is_that_at_sizes_that_took_no_part():
    """The first and the last size are never held out; of three, the one between them is."""
    line = [LaunchSample(1, elements, 1, 1e-9 * elements) for elements in SIZES]
    assert coefficients_of(line)[1] == pytest.approx(0.0, abs=1e-9)
    three = [line[0], LaunchSample(1, SIZES[1], 1, 2e-9 * SIZES[1]), line[-1]]
    assert coefficients_of(three)[1] == pytest.approx(0.5)
    odd = [LaunchSample(1, each.elements, 1, each.seconds * (1 + index % 2)) for index, each in enumerate(line)]
    assert (coefficients_of(odd)[1] or 0.0) > 0.25


def test_one_disturbed_size_does_not_spoil_the_error():
    line = [LaunchSample(1, elements, 1, 1e-9 * elements) for elements in SIZES]
    line[2] = LaunchSample(1, SIZES[2], 1, 2e-9 * SIZES[2])
    error = coefficients_of(line)[1]
    assert error is not None and error < 0.2


def test_short_launches_that_differ_by_chance_count_together():
    random = np.random.default_rng(3)
    short = [LaunchSample(1, 2**index, 1, 1e-5 * float(random.uniform(0.7, 1.3))) for index in range(10)]
    long = [LaunchSample(1, 2**index, 1, 1e-5 + 1e-9 * 2**index) for index in range(16, 24)]
    error = coefficients_of([*short, *long])[1]
    assert error is not None and error < 0.1


def test_two_sizes_tell_no_error():
    assert coefficients_of([LaunchSample(1, 100, 1, 1e-6), LaunchSample(1, 200, 1, 2e-6)])[1] is None


def test_matrices_have_a_price_for_their_sides():
    random = np.random.default_rng(1)
    made = [
        LaunchSample(1, rows * columns, 1, 1e-5 + 3e-10 * rows * columns + 2e-8 * (rows + columns), rows + columns)
        for rows, columns in random.integers(32, 2048, (40, 2)).tolist()
    ]
    found, _ = coefficients_of(made)
    assert found.side_s == pytest.approx(2e-8, rel=1e-3)


def test_least_squares_is_that_of_the_best_support():
    """Compared with the unconstrained solutions on all subsets of the columns."""
    random = np.random.default_rng(2)
    for _ in range(30):
        columns, target = random.normal(size=(12, 4)), random.normal(size=12)
        found = non_negative_least_squares(columns, target)
        best = float(np.linalg.norm(target))
        for count in range(1, 5):
            for support in map(list, itertools.combinations(range(4), count)):
                values = np.linalg.lstsq(columns[:, support], target, rcond=None)[0]
                if (values >= 0).all():
                    best = min(best, float(np.linalg.norm(columns[:, support] @ values - target)))
        assert (found >= 0).all()
        assert float(np.linalg.norm(columns @ found - target)) == pytest.approx(best)


# -------------------------------------------------------------------- curves


def points(*seconds: float) -> list[CallCost]:
    return [CallCost(1024.0 * 4**index, wall_s, wall_s / 2) for index, wall_s in enumerate(seconds)]


def test_a_line_is_interpolated_without_error():
    line = [CallCost(nbytes, 1e-4 + 1e-8 * nbytes, 1e-5) for nbytes in (1e3, 1e4, 1e5, 1e6, 1e7)]
    curve = curve_of(line[::-1])
    assert curve.nbytes == (1e3, 1e4, 1e5, 1e6, 1e7)
    assert curve.error == pytest.approx(0.0, abs=1e-12)
    assert curve.wall_s[-1] == line[-1].wall_s


def test_every_size_but_the_first_is_held_out():
    curve = curve_of(
        [CallCost(1.0, 1.0, 0.0), CallCost(2.0, 4.0, 0.0), CallCost(3.0, 7.0, 0.0), CallCost(4.0, 12.0, 0.0)]
    )
    assert curve.error == pytest.approx(1.0 / 6.0)  # 10 where 12 was measured
    assert curve_of(points(1.0, 2.0)).error is None


def doubled(size: int, apart: float | None = None) -> list[CallCost]:
    """Points of a straight line, one of which takes twice as long; moments differ by ``apart`` there."""
    line = [CallCost(1024.0 * 2**index, 1e-4 + 1e-8 * 1024.0 * 2**index, 0.0, 0.01) for index in range(14)]
    line[size] = replace(line[size], wall_s=2.0 * line[size].wall_s, apart=apart)
    return line


@pytest.mark.parametrize("size", [10, 13])
def test_a_size_that_nothing_confirms_refuses_the_curve(size):
    error = curve_of(doubled(size, apart=1.0)).error
    assert error is not None and error > 0.2


def test_the_last_size_is_never_trusted_alone():
    error = curve_of(doubled(13)).error
    assert error is not None and error > 0.2
    error = curve_of(doubled(13)[:-1]).error
    assert error is not None and error < 0.01


@pytest.mark.parametrize("size", [10, 13])
def test_another_moment_confirms_a_step_of_the_curve(size):
    error = curve_of(doubled(size, apart=0.02)).error
    assert error is not None and error < 0.1


def test_small_sizes_that_differ_by_chance_count_together():
    random = np.random.default_rng(2)
    small = [CallCost(1024.0 * 2**index, 1e-4 * float(random.uniform(0.5, 1.5)), 0.0) for index in range(10)]
    large = [CallCost(1024.0 * 2**index, 1e-9 * 1024.0 * 2**index, 0.0) for index in range(10, 16)]
    error = curve_of([*small, *large]).error
    assert error is not None and error < 0.1
    wrong = [CallCost(each.nbytes, each.wall_s * (1.5 if index % 2 else 1.0), 0.0) for index, each in enumerate(large)]
    error = curve_of([*small, *wrong]).error
    assert error is not None and error > 0.2


def test_curves_never_fall():
    curve = curve_of(points(1.0, 3.0, 2.0, 4.0))
    assert curve.wall_s == (1.0, 2.5, 2.5, 4.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([1.0, 2.0], [1.0, 2.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 4.0, 2.0, 3.0], [1.0, 3.0, 3.0, 3.0]),
    ],
)
def test_falling_neighbours_get_their_mean(values, expected):
    assert rising(values) == pytest.approx(expected)


def test_a_disturbed_moment_does_not_count():
    """The times of a moment agree with each other, whether it was disturbed or not."""
    disturbed, quiet, other = [(2.0, 0.4)] * 5, [(1.0, 0.2)], [(1.02, 0.2)]
    found = quietest(1024.0, [disturbed, quiet])
    assert (found.wall_s, found.cores_s, found.apart) == pytest.approx((1.0, 0.2, 1.0))
    found = quietest(1024.0, [disturbed, quiet, other])
    assert (found.wall_s, found.cores_s, found.apart) == pytest.approx((1.01, 0.2, 0.02))
    assert quietest(1024.0, [disturbed]).apart is None


def test_times_that_vary_on_a_quiet_machine_have_their_mean():
    """Two modes, each as frequent as the other, at two moments."""
    found = averaged(1024.0, [[(1.0, 0.1), (2.0, 0.2)], [(2.0, 0.2), (1.0, 0.1)]])
    assert (found.wall_s, found.cores_s, found.apart) == pytest.approx((1.5, 0.15, 0.0))
    found = averaged(1024.0, [[(1.0, 0.1)], [(2.0, 0.2)]])
    assert (found.wall_s, found.apart) == pytest.approx((1.5, 1.0 / 3.0))  # from 1 and 2 to their mean
    assert averaged(1024.0, [[(1.0, 0.1)]]).apart is None


def test_disturbed_times_do_not_count():
    assert typical([1.0, 1.1, 1.2, 1.3, 500.0, 1000.0]) == pytest.approx(1.15)
    assert typical([5.0]) == 5.0


def test_times_that_differ_by_chance_have_a_mean_between_them():
    times = [1.0 + 0.001 * index for index in range(30)]
    assert min(times) < typical(times) <= float(np.median(times))
