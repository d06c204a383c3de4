"""The pictures of a run: step times, bytes and errors over the steps, with the decisions marked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..plans.numbers import duration, three_digits, volume
from ..stats.history import Sample
from .data import ReportData
from .html import NONE, Markup, details, percent_of, table, table_row, tag, wide

_POINTS = 1000  # points in a line
_ROWS = 200  # rows in the table
_NEAR = 0.045  # part of the width: decisions that are nearer to one another share a badge
_ABOVE = 26  # pixels for the badges
_BELOW = 20  # pixels for the steps


def run(data: ReportData) -> Markup | None:
    """The pictures and the table behind them; ``None`` if there is nothing to show."""
    shown = [each for each in all_series(data) if each.is_worth(data.samples)]
    if not shown:
        return None
    last = max(data.step, *(row.step for row in data.samples), *(row.step for row in data.decisions))
    samples = [[row.step, *(each.written(row) for each in shown)] for row in thinned(data.samples, _POINTS)]
    return tag(
        "figure",
        tag("p", "", class_="readout script", aria_live="off"),
        tag(
            "div",
            [_picture(each, data, last, bool(data.decisions) and each is shown[0]) for each in shown],
            class_="charts",
        ),
        details("Table: the run", _table(data, shown)),
        id="run",
        data_last=last,
        data_samples=json.dumps(samples),
    )


def _picture(series: Series, data: ReportData, last: int, marked: bool) -> Markup:
    """One picture: the values at its left, the line over the steps at its right.

    Args:
        series: what it shows.
        data: the training.
        last: the step at its right end.
        marked: whether decisions have badges.
    """
    rows = series.points(data.samples)
    top = top_of(max(*(value for _, value in rows), *(value for level in series.levels for _, value in level.parts)))
    above = _ABOVE if marked else 8
    floor = above + series.height
    height = floor + _BELOW

    def y(value: float) -> float:
        return round(floor - series.height * value / top, 2)

    values = ticks(top * series.scale, 4 if series.height > 150 else 2)
    numbers = [
        tag("text", f"{value:g}", x="100%", dx=-8, y=y(value / series.scale) + 4, text_anchor="end", class_="tick")
        for value in values
    ]
    heights = [value / series.scale for value in values]
    grid = [
        tag("line", x1="0", x2="100%", y1=y(each), y2=y(each), class_="rule" if each else "floor") for each in heights
    ]
    line = _line(rows, last, top)
    unit = f", {series.unit}" if series.unit else ""
    plot = tag(
        "svg",
        tag("title", f"{series.title} over {last:,} steps"),
        grid,
        _steps(last, floor),
        _decisions(data, last, above, floor, marked),
        tag(
            "svg",
            line,
            viewBox="0 0 1000 1000",
            preserveAspectRatio="none",
            y=above,
            width="100%",
            height=series.height,
        ),
        _levels(series, last, y, rows[-1][1]),
        tag("line", class_="cross", y1=above, y2=floor, x1="0", x2="0"),
        width="100%",
        height=height,
        role="img",
    )
    kind = "chart" if series.is_wide else "chart is-small"
    axis = tag("svg", numbers, width="100%", height=height, aria_hidden="true")
    return tag("div", tag("h3", f"{series.title}{unit}"), tag("div", axis, plot, class_="plot"), class_=kind)


def _line(rows: Sequence[tuple[int, float]], last: int, top: float) -> Markup:
    points = [(1000 * step / last, 1000 * (1 - value / top)) for step, value in extremes(rows, _POINTS)]
    path = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return tag("path", d=path, class_="line", vector_effect="non-scaling-stroke")


def _levels(series: Series, last: int, y: Callable[[float], float], now: float) -> list[Markup]:
    """The horizontal lines. Their labels are at their ends, on the side where the last value ``now`` is not; that of
    the highest is above it in any case."""
    found = []
    for number, level in enumerate(sorted(series.levels, key=lambda level: -level.parts[-1][1])):
        value = level.parts[-1][1]
        label_y = y(value) + (14 if number and now >= value else -5)
        ends = [*(step for step, _ in level.parts[1:]), last]
        for (begin, value), end in zip(level.parts, ends, strict=True):
            x1, x2 = percent_of(begin, last), percent_of(end, last)
            found.append(tag("line", x1=x1, x2=x2, y1=y(value), y2=y(value), class_="level"))
        found.append(tag("text", level.label, x="100%", y=label_y, text_anchor="end", class_="label"))
    return found


def _steps(last: int, floor: int) -> list[Markup]:
    return [
        tag(
            "text",
            f"{at:,.0f}" if at else "step 0",
            x=percent_of(at, last),
            y=floor + 15,
            text_anchor="start" if not at else "end" if at > 0.93 * last else "middle",
            class_="tick",
        )
        for at in ticks(last, 5)
    ]


def _decisions(data: ReportData, last: int, above: int, floor: int, marked: bool) -> list[Markup]:
    """A line for each decision and, in the first picture, a badge with its number, or with those of several."""
    found = []
    clusters: list[list[int]] = []
    for number, row in enumerate(data.decisions):
        x = percent_of(row.step, last)
        found.append(tag("line", x1=x, x2=x, y1=above, y2=floor, class_="decision"))
        if clusters and row.step - data.decisions[clusters[-1][0]].step < _NEAR * last:
            clusters[-1].append(number)
        else:
            clusters.append([number])
    if not marked:
        return found
    for cluster in clusters:
        text = f"{cluster[0] + 1}" if len(cluster) == 1 else f"{cluster[0] + 1}{NONE}{cluster[-1] + 1}"
        width, step = 12 + 7 * len(text), data.decisions[cluster[0]].step
        x, left = percent_of(step, last), -3 if step < 0.9 * last else 3 - width  # none sticks out at the right
        badge = tag("rect", x=left, width=width, height=18, rx=9), tag("text", text, x=left + width / 2, y=13)
        inner = tag("svg", badge, x=x, y=2, overflow="visible", width=width, height=18)
        found.append(tag("a", inner, class_="badge", href=f"#decision-{cluster[0] + 1}", aria_label=f"decision {text}"))
    return found


def _table(data: ReportData, shown: Sequence[Series]) -> Markup:
    rows = thinned(data.samples, _ROWS)
    body = [table_row(f"{each.step:,}", [one.written(each) or NONE for one in shown]) for each in rows]
    note = None
    if len(rows) < len(data.samples):
        note = tag("p", f"{len(rows)} of {len(data.samples):,} samples.", class_="note")
    return wide(table(("step", *(each.title.lower() for each in shown)), body), note)


# -------------------------------------------------------------------- axes


def ticks(last: float, count: int) -> list[float]:
    """Round numbers from 0 to ``last``, at equal distances of 1, 2 or 5 times a power of ten.

    Args:
        last: the end of the axis, above 0; of an axis without an extent only 0 is marked.
        count: how many distances there are about.
    """
    if not 0 < last < math.inf:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(last / count))
    steps = [power * factor for factor in (1, 2, 5, 10)]
    step = next((step for step in steps if step * count >= last * 0.9), steps[-1])
    if step > last:  # 0 alone would be no scale
        step = steps[steps.index(step) - 1]
    return [round(step * number, 12) for number in range(math.floor(last / step * (1 + 1e-9)) + 1)]


def top_of(largest: float) -> float:
    """The end of an axis that shows ``largest`` with some space above it; 1 if there is nothing to show."""
    if not 0 < largest < math.inf:
        return 1.0
    return largest * 1.12


# -------------------------------------------------------------------- series


@dataclass(frozen=True)
class HorizontalLine:
    """A horizontal line, which may change its height."""

    label: str  # its name
    parts: tuple[tuple[int, float], ...]  # the steps from which it has a height, and these heights


@dataclass(frozen=True)
class Series:
    """A picture of the run."""

    key: str  # the attribute of a sample that it shows
    title: str
    show: Callable[[float], str]  # writes a value with its unit
    unit: str  # the unit of its axis
    scale: float  # the factor to this unit
    height: int  # its pixels
    is_wide: bool  # whether it takes the whole width of a large screen
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
