"""The figures of a run that a report draws over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..plans.numbers import duration, three_digits, volume
from ..stats.history import Sample
from .data import ReportData


@dataclass(frozen=True)
class HorizontalLine:
    """A horizontal line, which may change its height.

    Attributes:
        label: its name.
        parts: the steps from which it has a height, and these heights.
    """

    label: str
    parts: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Series:
    """A picture of the run.

    Attributes:
        key: the attribute of a sample that it shows.
        title: its title.
        show: writes a value with its unit.
        unit: the unit of its axis.
        scale: the factor to this unit.
        height: its pixels.
        is_wide: whether it takes the whole width of a large screen.
        levels: horizontal lines.
    """

    key: str
    title: str
    show: Callable[[float], str]
    unit: str
    scale: float
    height: int
    is_wide: bool
    levels: tuple[HorizontalLine, ...] = ()

    def points(self, samples: Sequence[Sample]) -> list[tuple[int, float]]:
        """The steps and values of the samples that have one."""
        return [(row.step, value) for row in samples if (value := getattr(row, self.key)) is not None]

    def is_worth(self, samples: Sequence[Sample]) -> bool:
        """Whether a picture of the samples would show anything: two values, and one above 0."""
        values = [value for _, value in self.points(samples)]
        return len(values) > 1 and any(values)

    def written(self, row: Sample) -> str:
        """The value of a sample with its unit; empty if it has none."""
        value = getattr(row, self.key)
        return "" if value is None else self.show(value)


def all_series(data: ReportData) -> list[Series]:
    """The pictures of a run."""
    times = tuple(filter(None, (_plain(data), _predicted(data))))
    sent = HorizontalLine(f"without compression {volume(data.plain_nbytes)}", ((0, data.plain_nbytes),))
    return [
        Series("step_s", "Time of a step", duration, "ms", 1e3, 190, True, times),
        Series("sent_nbytes", "Sent in a step, by this rank", volume, "MB", 1e-6, 110, True, (sent,)),
        Series("error", "Relative error of the gradients", three_digits, "", 1.0, 90, False),
        Series("residual_norm", "Norm of the residuals", three_digits, "", 1.0, 90, False),
    ]


def _plain(data: ReportData) -> HorizontalLine | None:
    """The time of a step without compression: as measured, from decision to decision, or else as predicted."""
    known = [(row.step, row.none_s) for row in data.decisions if row.none_s is not None]
    if known:
        parts = ((0, known[0][1]), *known[1:])
        return HorizontalLine(f"without compression {duration(known[-1][1])}", parts)
    if data.prediction is None:
        return None
    none_s = data.prediction.none_s
    return HorizontalLine(f"without compression {duration(none_s)}, predicted", ((0, none_s),))


def _predicted(data: ReportData) -> HorizontalLine | None:
    """The predicted time of a step, from decision to decision."""
    known = [(row.step, row.predicted_s) for row in data.decisions if row.predicted_s is not None]
    if not known and data.prediction is not None and data.compresses:
        known = [(0, data.prediction.step_s)]
    return HorizontalLine(f"predicted {duration(known[-1][1])}", tuple(known)) if known else None


def extremes(points: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """At most about ``count`` of the points: of each stretch, the smallest and the largest, so that no peak is lost."""
    if len(points) <= count:
        return list(points)
    size = -(-2 * len(points) // count)
    found: list[tuple[int, float]] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        found += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return found


def thinned(rows: Sequence[Sample], count: int) -> Sequence[Sample]:
    """At most ``count`` of the rows, at equal distances, the last one among them."""
    distance = max(-(-len(rows) // count), 1)
    return rows[::-1][::distance][::-1]
