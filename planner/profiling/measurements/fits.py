"""Fits of measured times, each with its relative error at sizes that were held out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...machines.curves import Coefficients, Curve, features_of
from ...machines.machine import Floats

APART = 0.05
"""Relative difference up to which two moments agree."""
_SMALL = 2.0  # sizes that take less than this many times the latency are small
_TINY = 1e-12  # gradients of a least-squares problem with columns of length 1 below which nothing improves


@dataclass(frozen=True)
class CallCost:
    """The cost of one call."""

    nbytes: float  # its size
    wall_s: float  # seconds
    cores_s: float  # CPU seconds of all threads
    apart: float | None = None
    """Relative difference of the two moments at which it took least; ``None`` if it was measured at one only."""


@dataclass(frozen=True)
class LaunchSample:
    """The seconds of one launch of a codec."""

    units: int  # number of units
    elements: int  # number of elements of all of them
    sources: int  # number of payloads that are merged
    seconds: float  # measured seconds
    sides: float = 0.0  # rows and columns of the matrices of all units; 0 without matrices


def curve_of(points: Sequence[CallCost]) -> Curve:
    """The curve through points, at least one, made not to fall.

    Its error is the median relative one at every size but the first, each held out in turn; the last size is
    extrapolated from the others. Sizes that take little more than the latency differ by chance: their sum counts as
    one, because a step has many small messages.

    One size that was disturbed spoils the prices around it, the last one those of everything larger. So one size
    that disagrees with the others, and with a second measurement, sets the error.
    """
    ordered = sorted(points, key=lambda point: point.nbytes)
    return _curve_through(ordered, _error_of(ordered))


def _curve_through(points: Sequence[CallCost], error: float | None = None) -> Curve:
    walls, cores = rising([each.wall_s for each in points]), rising([each.cores_s for each in points])
    return Curve(tuple(each.nbytes for each in points), tuple(walls), tuple(cores), error)


def _error_of(points: Sequence[CallCost]) -> float | None:
    if len(points) < 3:
        return None
    measured = np.array([each.wall_s for each in points[1:]])
    predicted = np.array([_from_others(points, held) for held in range(1, len(points))])
    latency_s = float(np.median(rising([each.wall_s for each in points])[: (len(points) + 1) // 2]))
    errors = [_median_error(predicted, measured, latency_s)]
    for point, expected_s in zip(points[1:], predicted.tolist(), strict=True):
        error = abs(expected_s / point.wall_s - 1.0)
        if point.wall_s < _SMALL * latency_s:
            continue
        if point.apart is not None:
            errors.append(min(error, point.apart))
        elif point is points[-1]:
            errors.append(error)
    return max(errors)


def _from_others(points: Sequence[CallCost], held: int) -> float:
    """The seconds of a point on the curve through the other points."""
    others = _curve_through([*points[:held], *points[held + 1 :]])
    return float(others.wall(np.array([points[held].nbytes]))[0])


def quietest(nbytes: float, moments: Sequence[Sequence[tuple[float, float]]]) -> CallCost:
    """The typical cost of a call of ``nbytes`` bytes, from the seconds and CPU seconds of several at each moment.

    Moments at which something else was running do not count. All moments that agree with the quietest one do.
    """
    timed = sorted(((typical([wall_s for wall_s, _ in calls]), calls) for calls in moments), key=lambda each: each[0])
    least_s = timed[0][0]
    apart = timed[1][0] / least_s - 1.0 if len(timed) > 1 else None
    counted = [call for wall_s, calls in timed if wall_s <= (1.0 + APART) * least_s for call in calls]
    wall_s, cores_s = map(typical, zip(*counted, strict=True))
    return CallCost(nbytes, wall_s, cores_s, apart)


def averaged(nbytes: float, moments: Sequence[Sequence[tuple[float, float]]]) -> CallCost:
    """The mean cost of a call at all moments, for calls whose time varies on a quiet machine, too."""
    walls = sorted(_middle([wall_s for wall_s, _ in calls]) for calls in moments)
    apart = (walls[-1] - walls[0]) / (walls[-1] + walls[0]) if len(walls) > 1 else None  # from the mean of both
    wall_s, cores_s = map(_middle, zip(*(call for calls in moments for call in calls), strict=True))
    return CallCost(nbytes, wall_s, cores_s, apart)


def _middle(values: Sequence[float]) -> float:
    """The mean of the middle half: as robust as the median, and it varies less."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.mean(ordered[cut : len(ordered) - cut])


def typical(values: Sequence[float]) -> float:
    """The time that a quiet machine takes, from times of which some were disturbed.

    Other processes can only make times longer, so the longest third does not count. The rest differs by chance.
    """
    return _middle(sorted(values)[: math.ceil(2 * len(values) / 3)])


def rising(values: Sequence[float]) -> list[float]:
    """The values, with neighbours that fall replaced by their mean until nothing falls."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, times = pools.pop()
            mean, count = (before * times + mean * count) / (times + count), times + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def coefficients_of(samples: Sequence[LaunchSample]) -> tuple[Coefficients, float | None]:
    """The coefficients with the least relative error for all samples, and that error at held-out sizes.

    Every number of elements but the first and the last is held out once. The error is the median relative one of the
    coefficients that fit the others. Launches that take little more than the shortest one differ by chance: their sum
    counts as one. It is ``None`` with fewer than three numbers of elements.
    """
    fitted = _fitted(samples)
    out: list[LaunchSample] = []
    predicted: list[float] = []
    for size in sorted({each.elements for each in samples})[1:-1]:
        held = [each for each in samples if each.elements == size]
        out += held
        predicted += _predicted(_fitted([each for each in samples if each.elements != size]), held).tolist()
    if not out:
        return fitted, None
    return fitted, _median_error(np.array(predicted), _seconds(out), float(_seconds(samples).min()))


def _median_error(predicted: Floats, measured: Floats, shortest_s: float) -> float:
    """The median relative error, with all that takes little more than ``shortest_s`` seconds taken together."""
    small = predicted < _SMALL * shortest_s
    errors = list(np.abs(predicted[~small] / measured[~small] - 1.0))
    if small.any():
        errors.append(abs(predicted[small].sum() / measured[small].sum() - 1.0))
    return float(np.median(errors))


def _fitted(samples: Sequence[LaunchSample]) -> Coefficients:
    sizes = sorted({each.elements for each in samples})
    knees = sizes[1:-2] or [sizes[-1]]  # two sizes beyond a knee, so that no single one decides
    found = [_fitted_with(samples, float(knee)) for knee in knees]
    return min(found, key=lambda each: float(np.sum(np.square(_predicted(each, samples) / _seconds(samples) - 1.0))))


def _fitted_with(samples: Sequence[LaunchSample], knee: float) -> Coefficients:
    """The non-negative coefficients for a knee, by least squares of relative errors."""
    units, elements, sources, sides = _sizes(samples)
    columns = features_of(units, elements, sources, sides, knee) / _seconds(samples)[:, None]
    values = non_negative_least_squares(columns, np.ones(len(samples)))
    return Coefficients(*map(float, (*values, knee)))


def _sizes(samples: Sequence[LaunchSample]) -> Floats:
    """Units, elements, sources and sides of all samples, ``[4, n]``."""
    rows = [[each.units, each.elements, each.sources, each.sides] for each in samples]
    return np.array(rows, dtype=np.float64).T


def _seconds(samples: Sequence[LaunchSample]) -> Floats:
    return np.array([each.seconds for each in samples])


def _predicted(coefficients: Coefficients, samples: Sequence[LaunchSample]) -> Floats:
    return coefficients.seconds(*_sizes(samples))


def non_negative_least_squares(columns: Floats, target: Floats) -> Floats:
    """The ``x >= 0`` with the least ``|columns @ x - target|`` (Lawson and Hanson, 1974, algorithm 23.10).

    Args:
        columns: ``[m, n]``; columns of zeros get the coefficient 0.
        target: ``[m]``.
    """
    lengths = np.linalg.norm(columns, axis=0)
    unit = columns / np.where(lengths > 0, lengths, 1.0)  # coefficients differ by many powers of ten
    count = columns.shape[1]
    positive = np.zeros(count, dtype=bool)
    found = np.zeros(count)
    for _ in range(10 * count):
        gradient = unit.T @ (target - unit @ found)
        gradient[positive] = 0.0
        if gradient.max() <= _TINY:
            break
        positive[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[positive] = np.linalg.lstsq(unit[:, positive], target, rcond=None)[0]
            falling = positive & (trial <= 0)
            if not falling.any():
                break
            ratios = found[falling] / np.maximum(found[falling] - trial[falling], _TINY)
            found = found + ratios.min() * (trial - found)
            positive &= found > _TINY
            found[~positive] = 0.0
        found = trial
    result: Floats = found / np.where(lengths > 0, lengths, 1.0)
    return result
