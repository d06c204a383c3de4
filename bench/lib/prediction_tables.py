"""The Markdown table of predicted training steps against measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from bench.lib.auto_tables import MODELS
from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown
from bench.lib.step_tables import AGAIN, PLAIN, bits_per_s, network_name, rate_name, short_time

PATH = RESULTS / "cpu" / "predictions.csv"
SAFE, AGGRESSIVE = "auto, safe", "auto, aggressive"

Arms = Mapping[str, Mapping[str, str]]


def predictions_table(path: Path = PATH) -> str:
    """A line for every model and links: errors of the predictions of all plans, and the regret of auto, in percent."""
    found: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in read_csv(path):
        found.setdefault((row["model"], row["network"], row["rate"]), {})[row["arm"]] = row
    order = sorted(found, key=lambda cell: (cell[0], cell[1], bits_per_s(cell[2])))
    return markdown([_line(*cell, found[cell]) for cell in order], list(_line(*order[0], found[order[0]])))


def _line(model: str, network: str, rate: str, arms: Arms) -> dict[str, str]:
    errors = {arm: 100 * float(row["error"]) for arm, row in arms.items() if arm != AGAIN and row["error"]}
    worst = max(errors, key=lambda arm: abs(errors[arm]))
    return {
        "": f"{MODELS[model]}, {rate_name(rate)}, {network_name(network)}",
        "plain DDP": short_time(arms[PLAIN]["median_s"]),
        "again": f"{_percent(arms[AGAIN], 'ratio_to_plain') - 100:+.1f}",
        "median error": f"{statistics.median(map(abs, errors.values())):.1f}",
        "largest error": f"{errors[worst]:+.0f} `{worst}`",
        "regret, safe": f"{_percent(arms[SAFE], 'regret'):.1f}",
        "regret, aggressive": f"{_percent(arms[AGGRESSIVE], 'regret'):.1f}",
    }


def _percent(row: Mapping[str, str], column: str) -> float:
    return 100 * float(row[column])
