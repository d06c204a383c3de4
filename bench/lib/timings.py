"""Rows of ``microbench.csv`` from the times of cases; ``kernels/microbench.py`` documents the columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.lib.cases import COMPILED, EAGER, FUSED, Case
from bench.lib.record import csv_path, device_name, merge_csv, read_csv
from bench.lib.sizes import format_numel

KEY = (
    "compressor",
    "direction",
    "sources",
    "implementation",
    "numel",
    "dtype",
    "threads",
)  # columns that identify a row
OVERHEAD_NUMEL = 2**14  # a call's cost to the host is reported up to this size
RESERVE_NBYTES = 2**30  # memory for the copy and the temporaries of the references
FACTORS = {EAGER: "factor_over_eager", COMPILED: "factor_over_compiled"}


@dataclass(frozen=True)
class Timing:
    """Measured times of a case, in seconds.

    Attributes:
        quartile_1_s, median_s, quartile_3_s: quartiles over the rounds.
        copy_s: time of the copy that the case is compared with.
        copy_nbytes: bytes that the copy reads and writes.
        host_s: time for which a call keeps the calling thread busy.
        columns: further columns of the row.
    """

    quartile_1_s: float
    median_s: float
    quartile_3_s: float
    copy_s: float
    copy_nbytes: int
    host_s: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


class Recorder:
    """Writes timings as rows of ``microbench.csv`` and prints them, one by one, so that an interrupted run keeps them.

    Args:
        device: the device that is measured.
        keep: whether rows that are not measured again stay in the file; otherwise the file starts empty.

    Raises:
        ValueError: the rows to keep were measured on another device.
    """

    def __init__(self, device: torch.device, keep: bool) -> None:
        self.device, self.path = device, csv_path("microbench", device)
        others = {row["device"] for row in read_csv(self.path)} - {device_name(device)}
        if keep and others:
            names = ", ".join(sorted(others))
            raise ValueError(f"{self.path.name} has rows measured on {names}: measure everything, or move the file")
        if not keep:
            self.path.unlink(missing_ok=True)
        self.peers_s: dict[tuple[Case, int | str], float] = {}  # medians of the references, by case and threads
        self.free_nbytes = free_nbytes(device) - RESERVE_NBYTES  # before anything is allocated

    def measure(self, case: Case, threads: int | str, timed: Callable[[], Timing]) -> str:
        """Write the row of ``case``, whose times ``timed`` returns.

        Returns:
            Its note: why there is no timing, because memory is too short or because of an error; otherwise the empty
            string.
        """
        note, timing = "", None
        if case.held_nbytes > self.free_nbytes:
            needed, free = case.held_nbytes / 2**30, self.free_nbytes / 2**30
            note = f"not measured: needs {needed:.1f} GiB, but {free:.1f} GiB are free"
        else:
            try:
                timing = timed()
            except Exception as error:  # after any error, other cases can still be measured
                note = "not measured: " + f"{type(error).__name__}: {error}".partition("\n")[0]
        self.add(case, threads, timing, note)
        return note

    def add(self, case: Case, threads: int | str, timing: Timing | None, note: str = "") -> None:
        """Write the row of ``case``; without a timing, the row has only its note."""
        row: dict[str, Any] = {
            "compressor": case.spec,
            "direction": case.direction,
            "sources": case.sources,
            "implementation": case.implementation,
            "numel": case.numel,
            "dtype": case.dtype,
            "threads": threads,
            "moved_nbytes": case.moved_nbytes,
        }
        columns = ("median_s", "quartile_1_s", "quartile_3_s", "gb_per_s", "copy_gb_per_s", "percent_of_copy")
        row |= dict.fromkeys((*columns, "host_us_per_call", "factor_over_eager"), "") | {"note": note}
        if timing is not None:
            rate, copy_rate = case.moved_nbytes / timing.median_s, timing.copy_nbytes / timing.copy_s
            values = (timing.median_s, timing.quartile_1_s, timing.quartile_3_s, rate / 1e9, copy_rate / 1e9)
            row |= zip(columns, [f"{value:.4g}" for value in (*values, 100 * rate / copy_rate)], strict=True)
            if case.numel <= OVERHEAD_NUMEL and timing.host_s is not None:
                row["host_us_per_call"] = f"{timing.host_s * 1e6:.1f}"
            row |= timing.columns
            self.peers_s[case, threads] = timing.median_s
            if case.implementation == FUSED:
                for peer, column in FACTORS.items():
                    peer_s = self.peers_s.get((replace(case, implementation=peer), threads))
                    row |= {} if peer_s is None else {column: f"{peer_s / timing.median_s:.1f}"}
        merge_csv("microbench", self.device, [row], KEY)
        print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    """A line of text for the terminal that sums up a row."""
    what = f"{row['compressor']:<54}{row['direction']:<7}{row['sources']:>2}  {row['implementation']:<16}"
    what += f"{format_numel(row['numel']):>6} {row['dtype']:<9}" + (
        f"{row['threads']} threads" if row["threads"] else ""
    )
    if row["note"]:
        return f"{what}  {row['note']}"
    what += f"{row['gb_per_s']:>9} GB/s {row['percent_of_copy']:>7} %"
    what += f"{row['host_us_per_call']:>9} us" if row["host_us_per_call"] else ""
    factors = [f"{row[column]} x {peer}" for peer, column in FACTORS.items() if row.get(column)]
    return "  ".join([what, *factors])


def free_nbytes(device: torch.device) -> int:
    """Bytes of memory that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
