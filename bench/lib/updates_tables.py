"""The Markdown table of models whose updates are averaged: what they send, and their accuracy."""

from __future__ import annotations

import statistics
from pathlib import Path

from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown_of_cells

UPDATES = RESULTS / "cpu" / "updates.csv"
PLAIN, EVERY = "none", ", every "


def accuracy_table(
    steps: int,
    peak_lr: float,
    beta2: float,
    ranks: int = 2,
    network: str = "bytes_lm",
    optimizer: str = "adamw",
    path: Path = UPDATES,
) -> str:
    """A row for every arm, with the loss in bits after training, and the difference to plain DDP at the same seeds."""
    bits: dict[str, dict[str, float]] = {}
    sent: dict[str, str] = {}
    for row in read_csv(path):
        numbers = int(row["steps"]), float(row["peak_lr"]), float(row["beta2"]), int(row["ranks"])
        names = row["network"], row["optimizer"]
        if (*numbers, *names) == (steps, peak_lr, beta2, ranks, network, optimizer):
            bits.setdefault(row["arm"], {})[row["seed"]] = float(row["bits"])
            sent[row["arm"]] = row["sent_bits"]
    table = []
    for arm, found in sorted(bits.items(), key=lambda item: _order(item[0])):
        differences = [found[seed] - bits[PLAIN][seed] for seed in found]
        change = "" if arm == PLAIN else f"{statistics.fmean(differences):+.3f}"
        each = "" if arm == PLAIN else ", ".join(f"{one:+.3f}" for one in differences)
        spec, of_updates, rest = arm.partition(EVERY)
        every, _, decay = rest.partition(", decay ")
        what = "gradients" if not of_updates else f"updates of {every} step{'s' if every != '1' else ''}"
        name = "nothing" if arm == PLAIN else f"`{spec}`"
        table.append([what, name, decay, sent[arm], f"{statistics.fmean(found.values()):.3f}", change, each])
    unit = "bits per byte" if network.startswith("bytes") else "bits per image"
    head = ["averaged", "compressed by", "decay", "bits sent per element and step", unit, "mean difference"]
    return markdown_of_cells([*head, "of each seed"], table)


def _order(arm: str) -> tuple[int, bool, str]:
    """A key that sorts arms: gradients, then updates by the number of steps, each without compression first."""
    spec, _, rest = arm.partition(EVERY)
    return int(rest.partition(",")[0] or 0), spec not in (PLAIN, "Identity"), arm
