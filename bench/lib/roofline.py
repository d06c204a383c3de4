"""Plot of ``microbench.csv``: bandwidth of encode and decode relative to a copy, by size."""

from __future__ import annotations

import csv
import io
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from PIL import Image

from bench.lib.sizes import format_numel

matplotlib.use("agg")  # no display

DTYPE = "float32"  # rows of other dtypes are not drawn
MARKERS, DASHES = "osD^vP", ("-", "--", ":", "-.")


def roofline(csv_path: Path, png_path: Path) -> None:
    """Draw ``microbench.csv``: a column of panels per direction, a row of panels per number of threads.

    The roof, 100 percent, is the copy that each measurement is compared with: 64 MiB on the host; on a GPU, as many
    bytes as the measurement moves. The black line is a copy of the size on the axis, which exceeds the roof where it
    stays in the caches. A cross is the compressor's reference in plain torch. Gradients are fp32.

    Raises:
        ValueError: the file has no measurements.
    """
    with csv_path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["percent_of_copy"] and row["dtype"] == DTYPE]
    if not rows:
        raise ValueError(f"{csv_path}: no measurements")
    panels = _panels(rows)
    threads = sorted({row["threads"] for row in rows}, key=lambda text: int(text or 0))
    styles = _styles(sorted({row["compressor"] for row in rows} - {"copy"}))
    figure, grid = pyplot.subplots(
        len(threads), len(panels), figsize=(14, 1.4 + 3.4 * len(threads)), sharex=True, sharey=True, squeeze=False
    )
    for number, line_of_axes in zip(threads, grid, strict=True):
        here = [row for row in rows if row["threads"] == number]
        for (title, wanted), axes in zip(panels.items(), line_of_axes, strict=True):
            _draw(axes, here, wanted, styles)
            axes.set_title(title + (f", {number} {'thread' if number == '1' else 'threads'}" if number else ""))
        line_of_axes[0].set_ylabel("percentage of the copy's bandwidth")
        copy_rate = statistics.median(float(row["copy_gb_per_s"]) for row in here)
        scales = (lambda y, factor=copy_rate / 100: y * factor, lambda y, factor=copy_rate / 100: y / factor)
        right = line_of_axes[-1].secondary_yaxis("right", functions=scales)
        right.yaxis.set_major_formatter("{x:g}")
        right.set_ylabel(f"GB/s (the copy: {copy_rate:.3g})")
    for axes in grid[-1]:
        axes.set_xlabel("elements (fp32)")
        sizes = sorted({int(row["numel"]) for row in rows})
        axes.set_xticks(sizes, [format_numel(size) for size in sizes])
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.suptitle(_provenance(rows), fontsize="medium")
    figure.legend(handles, labels, loc="outside right center", fontsize="small", frameon=False)
    figure.set_layout_engine("constrained")
    png_path.parent.mkdir(parents=True, exist_ok=True)
    full_colour = io.BytesIO()
    figure.savefig(full_colour, dpi=90)
    pyplot.close(figure)
    # lines and text need few colours, and a palette makes the file three times smaller
    Image.open(full_colour).convert("RGB").quantize(128).save(png_path, optimize=True)


def _panels(rows: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    """Titles of the panels, each with the column values of its rows."""
    directions = sorted({(row["direction"], int(row["sources"])) for row in rows if row["direction"] != "copy"})
    titles = {"encode": "encode", "decode": "decode", "recode": "decode, merge {} and encode"}
    panels = {}
    for direction, sources in sorted(directions, key=lambda each: list(titles).index(each[0])):
        title = titles[direction] if direction == "recode" or sources == 1 else "decode and merge {}"
        panels[title.format(sources)] = {"direction": direction, "sources": str(sources)}
    return panels


def _draw(axes: Axes, rows: list[dict[str, str]], wanted: dict[str, str], styles: dict[str, dict[str, Any]]) -> None:
    axes.axhline(100, color="grey", linewidth=3, label="the copy")
    axes.plot(*_points(rows, compressor="copy"), color="black", marker=".", label="copy of this size")
    for spec, style in styles.items():
        points = _points(rows, compressor=spec, implementation="gckernels", **wanted)
        axes.plot(*points, label=spec, markersize=5, **style)
        eager = _points(rows, compressor=spec, implementation="eager torch", **wanted)
        axes.plot(*eager, "x", color=style["color"])
    axes.plot([], [], "x", color="grey", label="reference in plain torch")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.grid(alpha=0.3)


def _points(rows: list[dict[str, str]], **wanted: str) -> tuple[list[int], list[float]]:
    points = [
        (int(row["numel"]), float(row["percent_of_copy"]))
        for row in rows
        if all(row[column] == value for column, value in wanted.items())
    ]
    return [numel for numel, _ in sorted(points)], [percent for _, percent in sorted(points)]


def _styles(specs: list[str]) -> dict[str, dict[str, Any]]:
    """Line styles by spec: a colour per compressor, a dash pattern and a marker per configuration."""
    names = list(dict.fromkeys(spec.partition("(")[0] for spec in specs))
    styles, seen = {}, dict.fromkeys(names, 0)
    for spec in specs:
        name = spec.partition("(")[0]
        index, seen[name] = seen[name], seen[name] + 1
        styles[spec] = {
            "color": f"C{names.index(name) % 10}",
            "linestyle": DASHES[index % len(DASHES)],
            "marker": MARKERS[index % len(MARKERS)],
        }
    return styles


def _provenance(rows: list[dict[str, str]]) -> str:
    values = {column: sorted({row[column] for row in rows}) for column in ("device", "torch", "triton", "date")}
    device, torch, triton, date = (", ".join(each) for each in values.values())
    return f"{device}; torch {torch}, triton {triton}; {date}"
