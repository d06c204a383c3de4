"""Markdown tables of residuals in fp32 and in 8 bits: the times of encoding, and the accuracy of trainings."""

from __future__ import annotations

import statistics
from pathlib import Path

from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown_of_cells

TIMES, TRAINING = (RESULTS / "cpu" / f"{name}.csv" for name in ("residuals", "feedback"))
NATIVE = "native"


def times_table(path: Path = TIMES) -> str:
    """A row for every compressor, with ratios to the times with fp32 residuals."""
    found = {(row["compressor"], row["residual"], row["threads"]): row["ratio"] for row in read_csv(path)}
    columns = [(residual, threads) for threads in ("1", "2") for residual in ("fp32, again", "8 bits")]
    head = ["compressor", *(f"{residual}, {threads} thread(s)" for residual, threads in columns)]
    compressors = dict.fromkeys(compressor for compressor, *_ in found)
    return markdown_of_cells(
        head, [[f"`{each}`", *(found[each, *column] for column in columns)] for each in compressors]
    )


def accuracy_table(path: Path = TRAINING) -> str:
    """A row for every rule of feedback, with mean differences of bits per byte and their standard errors: to plain
    DDP, and of residuals in 8 bits to those in 32."""
    bits: dict[str, dict[str, float]] = {}
    for row in read_csv(path):
        bits.setdefault(row["arm"], {})[row["seed"]] = float(row["bits_per_byte"])

    def difference(one: str, other: str) -> str:
        each = [bits[one][seed] - bits[other][seed] for seed in bits[one]]
        return f"{statistics.fmean(each):+.4f} ± {statistics.stdev(each) / len(each) ** 0.5:.4f}"

    table = []
    for rule in sorted({arm.partition(",")[0] for arm in bits} - {NATIVE}):
        small, large = f"{rule}, 8 bits", f"{rule}, 32 bits"
        table.append([rule, difference(large, NATIVE), difference(small, NATIVE), difference(small, large)])
    head = ["feedback", "32 bits minus plain DDP", "8 bits minus plain DDP", "8 bits minus 32 bits"]
    return markdown_of_cells(head, table)
