"""Markdown tables of the compressors alone, on a CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown

PATH = RESULTS / "cpu" / "microbench.csv"
LARGE, WITH_EAGER = str(2**25), str(2**22)
ORDER = (
    *("Identity", "Cast16", "OneBit", "SignSGD", "SigNUM", "EFSignSGD", "EFSignSGD(block=None)"),
    *("TernGrad", "TernGrad(block=None)", "QSGD", "TBQ", "LinearQuant", "LinearQuant(stochastic=True)", "Natural"),
    *("BlockFP8", "BlockQuant", "BlockQuant(bits=4)"),
    *("ChunkTopK", "TopK", "MSTopK", "GradDrop", "Threshold", "DGC", "RandomK"),
)


def compressors_table(only: Collection[str] = ORDER, path: Path = PATH) -> str:
    """A line for every compressor: encoding and decoding in GB/s and in percent of a copy, and over eager torch."""
    rows = {
        (row["compressor"], row["direction"], row["numel"], row["threads"]): row
        for row in read_csv(path)
        if row["implementation"] == "gckernels" and row["sources"] == "1"
    }
    lines = []
    for name in (each for each in ORDER if each in only):
        line = {"": f"`{name}`"}
        for direction in ("encode", "decode"):
            for threads, noun in (("1", "thread"), ("2", "threads")):
                line[f"{direction}, {threads} {noun}"] = _bandwidth(rows[name, direction, LARGE, threads])
        for direction in ("encode", "decode"):
            factor = rows[name, direction, WITH_EAGER, "2"]["factor_over_eager"]
            line[f"over eager torch, {direction}"] = f"{float(factor):.0f}"
        lines.append(line)
    return markdown(lines, list(lines[0]))


def _bandwidth(row: Mapping[str, str]) -> str:
    return f"{float(row['gb_per_s']):.1f} ({float(row['percent_of_copy']):.0f})"
