"""Markdown tables of models of FSDP2: their steps on links, and their accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown_of_cells
from bench.lib.step_tables import bits_per_s, network_name, rate_name

ON_LINKS, TRAINING, PREDICTIONS = (
    RESULTS / "cpu" / f"{name}.csv" for name in ("sharded", "sharded_training", "sharded_predictions")
)
STEPS = 400  # a training has as many
NATIVE, AGAIN = "native", "native again"
WEIGHTS, EIGHT_BITS = ", weights ", ", residuals in 8 bits"
FLAT, LEVELS = ", shards over all ranks", ", added up inside machines"
"""The parts of an arm behind its plan."""


def steps_table(path: Path = ON_LINKS) -> str:
    """A row for every arm, with its step on each link over the step with FSDP's own collectives."""
    rows = [row for row in read_csv(path) if row["arm"] not in (NATIVE, AGAIN)]
    return _by_link(rows, lambda row: row["ratio_to_native"])


def predictions_table(path: Path = PREDICTIONS) -> str:
    """A row for every arm, with the measured step on each link, and how far the prediction is from it."""
    return _by_link(read_csv(path), lambda row: f"{1e3 * float(row['median_s']):.0f} ms, {_error(row['error'])}")


def _by_link(rows: Sequence[Mapping[str, str]], cell_of: Callable[[Mapping[str, str]], str]) -> str:
    """A table with a row for every arm, the slowest first, and a cell of its row of results on each link."""
    cells = sorted({(row["network"], row["rate"]) for row in rows}, key=lambda cell: (cell[0], bits_per_s(cell[1])))
    found = {(row["arm"], row["network"], row["rate"]): cell_of(row) for row in rows}
    arms = dict.fromkeys(row["arm"] for row in sorted(rows, key=lambda row: -float(row["median_s"])))
    head = ["attached", *(f"{network_name(network)}, {rate_name(rate)}" for network, rate in cells)]
    return markdown_of_cells(head, [[_name(arm), *(found.get((arm, *cell), "") for cell in cells)] for arm in arms])


def _error(error: str) -> str:
    return f"{float(error):+.0%}".replace("%", " %") if error else "no price"


def accuracy_table(steps: int = STEPS, path: Path = TRAINING) -> str:
    """A row for every arm, with the difference of its bits per byte after training to FSDP's own collectives."""
    bits: dict[str, dict[int, float]] = {}
    for row in read_csv(path):
        if int(row["steps"]) == steps:
            bits.setdefault(row["arm"], {})[int(row["seed"])] = float(row["bits_per_byte"])
    table = []
    for arm, found in sorted(bits.items()):
        if arm != NATIVE:
            each = [found[seed] - bits[NATIVE][seed] for seed in sorted(found)]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
            table.append([_name(arm), f"{statistics.fmean(each):+.4f}", f"{error:.4f}", str(len(each))])
    return markdown_of_cells(["attached", "mean difference", "standard error", "seeds"], table)


def _name(arm: str) -> str:
    ending = next((each for each in (FLAT, LEVELS, EIGHT_BITS) if arm.endswith(each)), "")
    plan, _, weights = arm.removesuffix(ending).partition(WEIGHTS)
    attached = {NATIVE: "nothing", "auto": "`sync.attach(model)`"}.get(plan, f"`{plan}`")
    return attached + (f', `weights="{weights}"`' if weights else "") + ending
