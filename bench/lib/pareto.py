"""Plots of quality of trained models against what is sent, with the Pareto front."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("Agg")  # needs no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image  # a dependency of matplotlib

from bench.lib.record import read_csv
from bench.lib.updates_tables import best_rates, to_plain

DPI = 100
PLAIN = "none"
COLOURS = {"point": "#1f5fa8", "plain": "#444444", "front": "#d1662b"}
# Candidate offsets of a label's centre from its point, in typographic points, nearest first.
LABEL_OFFSETS = [(x * r, y * r * 0.5) for r in (28, 45, 65, 90, 120) for x, y in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
LABEL_OFFSETS += [(0, y) for y in (12, -12, 24, -24, 40, -40)]
LABEL_OFFSETS.sort(key=lambda offset: math.hypot(*offset))

Point = tuple[float, float]
T = TypeVar("T")


# -------------------------------------------------------------------- convergence


def draw_convergence(path: Path) -> Path:
    """Draw ``convergence.csv``, a panel per model: the judged metric against bytes per step; returns the PNG's path."""
    rows = read_csv(path)
    if not rows:
        raise SystemExit(f"{path}: no rows; run `python -m bench.training.convergence` first")
    models = {
        model: [row for row in rows if row["model"] == model] for model in dict.fromkeys(r["model"] for r in rows)
    }
    return _save_panels(models, _draw_model, path.with_suffix(".png"))


def draw_updates(path: Path) -> Path:
    """Draw ``updates.csv``, a panel for each network and optimizer; returns the PNG's path.

    Losses, with the rate that is best for each arm, are drawn as differences to plain DDP with the same seed.
    """
    panels = {
        name: {arm: (bits, to_plain(results, arm)) for arm, (bits, _) in results.items()}
        for name, results in best_rates(read_csv(path)).items()
    }
    return _save_panels(panels, _draw_network, path.with_suffix(".png"))


def _draw_network(axes: Axes, name: str, results: Mapping[str, tuple[float, list[float]]]) -> None:
    axes.set_xlabel("bits sent per element and step by one rank")
    axes.set_ylabel("bits of test loss, minus plain DDP (axis reversed)")
    axes.set_title(f"{name}, 2 ranks; single runs and their mean, each arm with its best rate", fontsize=10)
    _draw_points(axes, results, higher_is_better=False)


def _save_panels(panels: Mapping[str, T], draw: Callable[[Axes, str, T], None], picture: Path) -> Path:
    """Draw a panel for each entry, one below the other, and write the picture; returns its path."""
    size = (9, 4.4 * len(panels))
    figure, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, (name, found) in zip(grid.flat, panels.items(), strict=True):
        draw(axes, name, found)
    figure.canvas.draw()  # settles the layout: labels are placed in pixels
    for axes in grid.flat:
        _place_labels(axes)
    return save(figure, picture)


def _draw_model(axes: Axes, model: str, rows: list[dict[str, str]]) -> None:
    in_bits = all(row["bits_per_byte"] for row in rows)  # fewer bits are better, higher accuracy is better
    results: dict[str, tuple[float, list[float]]] = {}
    for row in rows:
        value = float(row["bits_per_byte"]) if in_bits else 100 * float(row["accuracy"])
        results.setdefault(row["compressor"], (float(row["sent_nbytes_per_step"]), []))[1].append(value)
    axes.set_xlabel("bytes sent per step by one rank")
    axes.set_ylabel("bits per byte (axis reversed)" if in_bits else "test accuracy in %")
    seeds = len({row["seed"] for row in rows})
    axes.set_title(f"{model}, {rows[0]['world_size']} ranks; single runs and their mean, seeds: {seeds}", fontsize=10)
    _draw_points(axes, results, higher_is_better=not in_bits)


def _draw_points(axes: Axes, results: Mapping[str, tuple[float, list[float]]], higher_is_better: bool) -> None:
    """Draw what each arm sends and its values, with the Pareto front; better is up.

    Args:
        axes: the panel, with its labels.
        results: for each arm what it sends, and the value of each run.
        higher_is_better: whether higher values are better.
    """
    means = {spec: (sent, statistics.fmean(values)) for spec, (sent, values) in results.items()}
    low, high = _value_range(list(means.values()), higher_is_better)
    axes.set_xscale("log")
    axes.set_ylim((low, high) if higher_is_better else (high, low))
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    axes.margins(x=0.12)

    worst = low if higher_is_better else high
    for spec, (nbytes, values) in results.items():
        colour = COLOURS["plain" if spec == PLAIN else "point"]
        mean = means[spec][1]
        inside = low <= mean <= high
        label = "plain DDP" if spec == PLAIN else spec
        if not inside:
            label += " (diverged)" if math.isnan(mean) else f" ({mean:.4g})"
        height = mean if inside else worst
        axes.plot(nbytes, height, "o" if inside else "v", color=colour, markersize=6, zorder=4, clip_on=False)
        axes.plot([nbytes] * len(values), values, ".", color=colour, markersize=3, alpha=0.5, zorder=3)
        axes.annotate(
            label, (nbytes, height), (0, 0), textcoords="offset points", fontsize=8, ha="center", va="center"
        ).set_in_layout(False)  # labels get their places later
    if PLAIN in means:
        axes.axhline(means[PLAIN][1], color=COLOURS["plain"], linewidth=0.8, linestyle="--", zorder=1)
    front = pareto_front(list(means.values()), higher_is_better)
    if front:
        # stairs: between two points, the best known result is that of the point that sends less
        xs, ys = zip(*front, strict=True)
        stairs: dict[str, Any] = {"color": COLOURS["front"], "linewidth": 1.3, "drawstyle": "steps-post"}
        axes.plot(xs, ys, **stairs, zorder=2, label="Pareto front")
        axes.legend(loc="lower right", fontsize=8)


def pareto_front(points: list[Point], higher_is_better: bool) -> list[Point]:
    """The points, in order of bytes, that no other point beats with the same number of bytes or fewer."""
    sign = 1 if higher_is_better else -1
    front: list[Point] = []
    for nbytes, value in sorted((p for p in points if math.isfinite(p[1])), key=lambda p: (p[0], -sign * p[1])):
        if not front or sign * value > sign * front[-1][1]:
            front.append((nbytes, value))
    return front


def _value_range(points: list[Point], higher_is_better: bool) -> Point:
    """Limits of the value axis of a panel.

    Values further from the best than five times its distance from the median, and than a few percent, lie outside and
    are drawn at the edge: a single failed training would otherwise squeeze all other points into a line.
    """
    values = sorted((value for _, value in points if math.isfinite(value)), reverse=higher_is_better)
    if not values:
        return 0.0, 1.0
    best, median = values[0], values[len(values) // 2]
    reach = max(5 * abs(best - median), 0.04 * abs(best))
    worst = next(value for value in reversed(values) if abs(value - best) <= reach)
    pad = max(0.15 * abs(best - worst), 0.002 * abs(best))
    return min(best, worst) - pad, max(best, worst) + pad


def _place_labels(axes: Axes) -> None:
    """Move each label to the candidate position that overlaps other labels, points and the panel's edge least."""
    canvas: Any = axes.figure.canvas  # Agg's canvas, which has a renderer
    renderer = canvas.get_renderer()
    panel = axes.get_window_extent(renderer)
    pixels = DPI / 72
    texts: list[Any] = list(axes.texts)  # annotations, which have a point
    anchors = [axes.transData.transform(text.xy) for text in texts]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    if (legend := axes.get_legend()) is not None:
        taken.append(legend.get_window_extent(renderer))
    for text, (x, y) in zip(texts, anchors, strict=True):
        box = text.get_window_extent(renderer)
        best = None
        for dx, dy in LABEL_OFFSETS:
            centre_x, centre_y = x + dx * pixels, y + dy * pixels
            left, bottom = centre_x - box.width / 2, centre_y - box.height / 2
            tried = Bbox.from_bounds(left, bottom, box.width, box.height).padded(1)
            covered = sum(_overlap(tried, other) for other in taken)
            outside = tried.width * tried.height - _overlap(tried, panel)
            cost = covered + 3 * outside + math.hypot(dx, dy)
            if best is None or cost < best[0]:
                best = (cost, tried, (dx, dy))
        assert best is not None
        taken.append(best[1])
        text.set_position(best[2])
        axes.annotate(
            "",
            text.xy,
            xytext=best[2],
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "grey", "shrinkA": 6, "shrinkB": 3},
        ).set_in_layout(False)


def _overlap(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else common.width * common.height


def save(figure: Figure, picture: Path) -> Path:
    """Write a figure to the path ``picture``, and return that path."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=DPI)
        # 64 colours look the same and halve the file, which is kept in the repository
        Image.open(file).convert("RGB").quantize(64).save(picture, optimize=True)
    plt.close(figure)
    return picture
