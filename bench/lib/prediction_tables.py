"""Markdown tables of predicted training steps against measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown
from bench.lib.step_tables import AGAIN, PLAIN, bits_per_s, network_name, rate_name

PATH = RESULTS / "cpu" / "predictions.csv"
SAFE, AGGRESSIVE = "auto, safe", "auto, aggressive"
NAMES = {
    PLAIN: "plain DDP",
    "Cast16": "`Cast16`",
    "BlockQuant": "`BlockQuant`",
    "BlockQuant through alltoall": "`BlockQuant` through `alltoall`",
    "BlockQuant(bits=4)": "`BlockQuant(bits=4)`",
    "QSGD": "`QSGD`",
    "PowerSGD(rank=4)": "`PowerSGD(rank=4)`",
    "EFSignSGD": "`EFSignSGD`",
    "EFSignSGD through alltoall": "`EFSignSGD` through `alltoall`",
    "ChunkTopK": "`ChunkTopK`",
    SAFE: "`auto`, safe",
    AGGRESSIVE: "`auto`, aggressive",
}

Arms = Mapping[str, Mapping[str, str]]


def predictions_table(model: str, path: Path = PATH) -> str:
    """A column for every link of a model: each measured step in milliseconds and the error of its
    prediction in percent, then summaries, in percent as well."""
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in read_csv(path):
        if row["model"] == model:
            found.setdefault((row["network"], row["rate"]), {})[row["arm"]] = row
    cells = sorted(found.items(), key=lambda cell: (cell[0][0], -bits_per_s(cell[0][1])))
    columns = {_link(*where): arms for where, arms in cells}
    rows = [{"": name} | {link: _step(arms[arm]) for link, arms in columns.items()} for arm, name in NAMES.items()]
    summaries: dict[str, Callable[[Arms], str]] = {
        "median, largest error": _errors,
        "regret of `auto`, safe": lambda arms: f"{_percent(arms[SAFE], 'regret'):.1f}",
        "regret of `auto`, aggressive": lambda arms: f"{_percent(arms[AGGRESSIVE], 'regret'):.1f}",
        "plain DDP again": lambda arms: f"{_percent(arms[AGAIN], 'ratio_to_plain') - 100:+.1f}",
    }
    rows += [{"": name} | {link: cell(arms) for link, arms in columns.items()} for name, cell in summaries.items()]
    return markdown(rows, ["", *columns])


def _link(network: str, rate: str) -> str:
    return rate_name(rate) + ("" if network == "2" else f", {network_name(network)}")


def _step(row: Mapping[str, str]) -> str:
    error = f"{_percent(row, 'error'):+.0f}" if row["error"] else "no price"
    return f"{1e3 * float(row['median_s']):.0f} ({error})"


def _errors(arms: Arms) -> str:
    errors = [abs(float(row["error"])) for arm, row in arms.items() if arm != AGAIN and row["error"]]
    return f"{100 * statistics.median(errors):.1f}, {100 * max(errors):.0f}"


def _percent(row: Mapping[str, str], column: str) -> float:
    return 100 * float(row[column])
