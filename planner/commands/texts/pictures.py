"""Pictures of timelines and of sweeps. They need matplotlib, which is optional."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ...machines.machine import Shared
from ...timeline.timeline import TimedStage, Timeline
from ..common.caveats import Band
from ..studies.prediction import SweepResult

Figure = Any  # matplotlib's, whose types are not needed where it is not installed

_BACKWARD = "#9a9a9a"
_LINKS = ("#6f6f6f", "#b0b0b0")
_COLOURS = (
    *("#2a5fa5", "#c8602a", "#4a8a4f", "#8a4a8a", "#b0972a", "#2a9aa5", "#a52a4a", "#6a6ac8", "#7a5a3a", "#3a7a6a"),
)


def _new_figure(width: float, height: float) -> Figure:
    """An empty figure, its size in inches."""
    from matplotlib.figure import Figure as Made

    return Made(figsize=(width, height), layout="constrained")


def _png_of(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


# -------------------------------------------------------------------- timelines


def draw_timelines(timelines: Mapping[str, Timeline], band: Band) -> bytes:
    """A picture of timelines, as the content of a PNG file, below each other on one time axis.

    Rows are the threads of computing and the lanes; a colour is a message. The row below shows how busy the links are.

    Args:
        timelines: by their titles.
        band: how exact they are.
    """
    rows = {title: _lanes(timeline) for title, timeline in timelines.items()}
    heights = [part for lanes in rows.values() for part in (len(lanes) + 1.5, 1.6)]
    figure = _new_figure(11, 0.8 + 0.3 * sum(heights))
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for number, (title, timeline) in enumerate(timelines.items()):
        label = f"{title}: {1e3 * timeline.step_s:.4g} ms ({band.text(timeline.step_s)})"
        _draw_lanes(axes[2 * number], label, timeline, rows[title])
        _draw_links(axes[2 * number + 1], timeline)
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(0, 1e3 * max(timeline.step_s for timeline in timelines.values()) * 1.01)
    return _png_of(figure)


def _lanes(timeline: Timeline) -> list[str]:
    """The names of the rows, from the top: backward, then the lanes in the order of the stages of a message."""
    keys = {stage.lane for stage in timeline.stages}
    order = {kind: index for index, kind in enumerate(("compute", "copy", "communicate"))}
    lanes = sorted(keys, key=lambda key: (key.phase, order[key.resource.does], key.resource.value, key.channel or 0))
    return ["backward", *(lane.name for lane in lanes)]


def _draw_lanes(axis: Any, title: str, timeline: Timeline, lanes: list[str]) -> None:
    row = {name: index for index, name in enumerate(lanes)}
    forward_s, step_s = timeline.forward_s, timeline.step_s
    pieces = [(start, end - start) for start, end in timeline.backward]
    around = [(0.0, forward_s), (step_s - timeline.optimizer_s, timeline.optimizer_s)]
    axis.broken_barh(_in_ms(around), (-0.4, 0.8), color=_BACKWARD, alpha=0.4)
    axis.broken_barh(_in_ms(pieces), (-0.4, 0.8), color=_BACKWARD)
    for name, color, spans in _bars(timeline.stages):
        axis.broken_barh(_in_ms(spans), (row[name] - 0.4, 0.8), color=color, edgecolor=color, linewidth=0.4)
    axis.axvline(1e3 * step_s, color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axis.set_ylim(len(lanes) - 0.4, -0.6)
    axis.set_title(title, fontsize=9, loc="left")


def _bars(stages: Sequence[TimedStage]) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """The bars of stages: the lane, the colour of the message, and pairs of start and duration."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for stage in stages:
        color = _COLOURS[stage.message % len(_COLOURS)]
        bars.setdefault((stage.lane.name, color), []).append((stage.start_s, stage.end_s - stage.start_s))
    return [(name, color, spans) for (name, color), spans in bars.items()]


def _in_ms(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(1e3 * start, 1e3 * duration) for start, duration in spans]


def _draw_links(axis: Any, timeline: Timeline) -> None:
    """Draw the load of the links, as a part of their capacity."""
    for number, (shared, load) in enumerate(timeline.utilisation.items()):
        if shared in (Shared.INTER, Shared.INTRA) and len(load.load):
            capacity = timeline.capacities.get(shared, 1.0)
            parts = [part / capacity for part in load.load]
            color = _LINKS[number % len(_LINKS)]
            axis.stairs(parts, [1e3 * at for at in load.times_s], fill=True, color=color, label=shared.value)
    axis.set_ylim(0, 1.05)
    axis.set_yticks([0.5], ["links"], fontsize=8)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, loc="upper right")


# -------------------------------------------------------------------- sweeps


def draw_sweeps(results: Sequence[SweepResult]) -> bytes:
    """A picture of how many times as fast a step is as without compression, as the content of a PNG file.

    It has a panel for each sweep.
    """
    figure = _new_figure(8, 3.6 * len(results))
    axes = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axis, result in zip(axes, results, strict=True):
        values, points = result.sweep.values, result.points
        gains = [point.gain for point in points]
        bands = [[point.gain * (1 + sign * point.band.margin) for point in points] for sign in (-1, 1)]
        label = "estimated" if any(point.band.estimated for point in points) else "error of the prediction"
        axis.fill_between(values, *bands, color=_COLOURS[0], alpha=0.15, linewidth=0, label=label)
        axis.plot(values, gains, marker="o", markersize=4, color=_COLOURS[0], label="best plan")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(values, [result.sweep.axis.label(value) for value in values], rotation=30, fontsize=8)
        axis.set_xticks([], minor=True)
        axis.set_xlabel(result.sweep.axis.title)
        axis.set_ylabel("times as fast as without", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return _png_of(figure)
