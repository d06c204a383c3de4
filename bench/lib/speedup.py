"""Plot of ``steps.csv``: how many times as fast as plain DDP's steps are, against the rate of the links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # needs no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.lib.pareto import save
from bench.lib.record import read_csv
from bench.lib.step_tables import AGAIN, MODELS, PLAIN, StepRow, arm_name, bits_per_s, network_name, rate_name

PEERS = "#888888"
COLOURS = ("#1f5fa8", "#d1662b", "#2a9d6f", "#8e4fa8", "#c23b4e", "#b8860b", "#17808f", "#5b5b9e", "#7a5230", "#d679b5")
LABEL_GAP = 0.043  # least distance of two labels, as a share of the panel's height


def draw_speedup(path: Path, model: str) -> Path:
    """Draw the steps of a model, a panel per network; returns the path of the picture, beside the file."""
    rows = [row for row in read_csv(path) if row["model"] == model and row["arm"] != AGAIN]
    if not rows:
        raise SystemExit(f"{path}: no rows of {model}; run `python -m bench.sync.steps --models {model}` first")
    networks = sorted({row["network"] for row in rows})
    arms = list(dict.fromkeys(row["arm"] for row in sorted(rows, key=lambda row: int(row["sent_nbytes"]))))
    colours = dict(zip([arm for arm in arms if not _is_peer(arm) and arm != PLAIN], COLOURS * 3, strict=False))
    figure, panels = plt.subplots(
        1, len(networks), figsize=(6.4 * len(networks), 5), squeeze=False, layout="constrained"
    )
    for axes, network in zip(panels.flat, networks, strict=True):
        _draw_network(axes, [row for row in rows if row["network"] == network], colours)
        axes.set_title(network_name(network), fontsize=10)
    figure.suptitle(f"DDP steps, {MODELS[model]}: times as fast as plain DDP", fontsize=11)
    figure.canvas.draw()  # settles the layout: labels are placed in pixels
    return save(figure, path.with_name(f"{path.stem}_{model}.png"))


def _is_peer(arm: str) -> bool:
    return "hook" in arm


def _draw_network(axes: Axes, rows: Sequence[StepRow], colours: dict[str, str]) -> None:
    rates = sorted({row["rate"] for row in rows}, key=bits_per_s)
    places = {rate: index for index, rate in enumerate(rates)}
    labels = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        points = sorted((places[row["rate"]], 1 / float(row["ratio_to_plain"])) for row in rows if row["arm"] == arm)
        colour = colours.get(arm, PEERS)
        style = "-" if arm in colours or arm == PLAIN else "--"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3.5, linewidth=1.4, color=colour)
        labels.append((points[0][1], arm_name(arm).replace("`", ""), colour))
    axes.set_yscale("log")
    axes.set_xticks(range(len(rates)), [rate_name(rate) for rate in rates], fontsize=8)
    axes.set_xlim(-0.29 * len(rates), len(rates) - 0.9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    axes.set_xlabel("rate of each link")
    _label(axes, labels)


def _label(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write the names of the lines left of their first points, in order and without overlaps."""
    low, high = (math.log(value) for value in axes.get_ylim())
    heights: list[float] = []
    for value, *_ in sorted(labels):
        height = (math.log(value) - low) / (high - low)
        heights.append(max(height, heights[-1] + LABEL_GAP) if heights else height)
    excess = max(heights[-1] - 0.98, 0.0)  # the upper labels must stay inside: shift what is too high
    for index in range(len(heights) - 1, -1, -1):
        above = heights[index + 1] - LABEL_GAP if index + 1 < len(heights) else heights[-1] - excess
        heights[index] = min(heights[index], above)
    for (value, name, colour), height in zip(sorted(labels), heights, strict=True):
        text: dict[str, Any] = {
            "textcoords": axes.transAxes,
            "fontsize": 7.5,
            "color": colour,
            "ha": "left",
            "va": "center",
        }
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": colour, "alpha": 0.6, "shrinkA": 1, "shrinkB": 2}
        axes.annotate(name, (0, value), (0.01, height), arrowprops=line, **text)
