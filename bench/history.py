"""Headline figures over time: what the files of results say now, with the commit of this checkout.

    python -m bench.history            # print them, and how they differ from the last ones
    python -m bench.history --update   # append those that have changed to bench/results/history.csv

A file of results has the figures of its last measurement alone. The history keeps ten of them, one row for each change,
with the date of the measurement, and its commit if the file has one.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.lib.program import program_parser
from bench.lib.record import RESULTS, read_csv

HISTORY = RESULTS / "history.csv"
COLUMNS = ("figure", "value", "date", "commit", "device", "file")
Row = Mapping[str, str]


@dataclass(frozen=True)
class Headline:
    """A figure of a file of results.

    Attributes:
        name: its name, for people.
        file: the file in ``bench/results``.
        where: the values of columns by which its rows are found.
        column: the column of the value. For several rows it is the median of the
            absolute values.
    """

    name: str
    file: str
    where: Mapping[str, str]
    column: str

    def row(self) -> dict[str, str] | None:
        """The row of the history; ``None`` if the file has no such figure."""
        rows = [row for row in read_csv(RESULTS / self.file) if self.where.items() <= row.items() and row[self.column]]
        if not rows:
            return None
        value = statistics.median(abs(float(row[self.column])) for row in rows)
        last = max(rows, key=lambda row: row["date"])
        found = {"figure": self.name, "value": f"{value:.4g}", "file": self.file, "device": last["device"]}
        return found | {"date": last["date"], "commit": last.get("commit", "")}


def _cell(model: str, rate: str, arm: str) -> dict[str, str]:
    return {"model": model, "network": "2", "rate": rate, "arm": arm}


AUTO, FOUR_BITS = "auto, safe", "BlockQuant(bits=4)"
ON_SLOW_LINK, NOT_THROTTLED = ("transformer_10m", "200mbit"), ("transformer_1m", "none")
SIGNS = {
    "compressor": "EFSignSGD",
    "direction": "encode",
    "implementation": "gckernels",
    "numel": str(2**25),
    "threads": "1",
}
HEADLINES = (
    Headline("chosen step over plain DDP's, 200 Mbit/s", "cpu/race.csv", _cell(*ON_SLOW_LINK, AUTO), "ratio_to_plain"),
    Headline(
        "4-bit step over plain DDP's, 200 Mbit/s", "cpu/steps.csv", _cell(*ON_SLOW_LINK, FOUR_BITS), "ratio_to_plain"
    ),
    Headline(
        "chosen step over plain DDP's, no throttle", "cpu/race.csv", _cell(*NOT_THROTTLED, AUTO), "ratio_to_plain"
    ),
    Headline("seconds of attaching", "cpu/race.csv", {"arm": AUTO}, "attach_s"),
    Headline(
        "step of a closed attachment over plain DDP's",
        "cpu/hook_overhead_2_ranks.csv",
        {"arm": "closed"},
        "ratio_to_plain",
    ),
    Headline("step after links changed over a new choice's", "cpu/drift.csv", {"arm": "followed"}, "ratio_to_fresh"),
    Headline("error of a predicted step", "cpu/predictions.csv", {}, "error"),
    Headline("signs of 2**25 elements, percent of a copy", "cpu/microbench.csv", SIGNS, "percent_of_copy"),
    Headline("milliseconds of a search for a plan", "cpu/policies.csv", {"policy": "auto"}, "select_ms"),
    Headline("seconds until an engine is built", "cpu/build_time.csv", {}, "build_s"),
)


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--update", action="store_true", help=f"append what has changed to {HISTORY.name}")
    options = parser.parse_args()
    before = {row["figure"]: row for row in read_csv(HISTORY)}
    changed = []
    for headline in HEADLINES:
        row = headline.row()
        last = before.get(headline.name)
        was = "" if last is None else f", was {last['value']}"
        print(f"{headline.name}: {'none' if row is None else row['value']}{was}")
        if row is not None and (last is None or last["value"] != row["value"]):
            changed.append(row)
    if options.update and changed:
        is_new = not HISTORY.exists()
        with HISTORY.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerows(changed)


if __name__ == "__main__":
    main()
