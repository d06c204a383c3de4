"""Hardware counters of the kernels, read by NVIDIA's ``ncu``: how busy each pipe and the memory are.

The environment variable ``BENCH_PROFILED`` may name other compressors than :data:`SPECS`, separated by spaces. Writes
``profile.csv``: the columns of ``ncu --page raw`` for every launch of gckernels. A case of decode encodes first.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.cases import FUSED, Case, new_tensors
from bench.lib.program import found, python_arguments
from bench.lib.record import results_folder

SPECS = ("EFSignSGD", "TopK", "ChunkTopK", "QSGD", "OneBit", "TernGrad", "RandomK")
NUMEL = 2**24
PLACES = ("/usr/local/cuda/bin/ncu",)
OURS = "regex:^_[a-z_]+_kernel$"  # torch's kernels have no underscore first
_PERCENT = ".avg.pct_of_peak_sustained_active"
METRICS = {
    "us": "gpu__time_duration.sum",
    "memory %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps %": f"sm__warps_active{_PERCENT}",
    "issue %": f"sm__inst_issued{_PERCENT}",
    "ALU %": f"sm__inst_executed_pipe_alu{_PERCENT}",
    "FMA %": f"sm__inst_executed_pipe_fma{_PERCENT}",
    "XU %": f"sm__inst_executed_pipe_xu{_PERCENT}",
    "LSU %": f"sm__inst_executed_pipe_lsu{_PERCENT}",
    "registers": "launch__registers_per_thread",
}
"""Columns of the table, with their names in ncu."""


def run_calls(budget: Budget) -> Result:
    """Encode and decode with every compressor of :data:`SPECS`."""
    device = torch.device("cuda")
    specs = os.environ.get("BENCH_PROFILED", " ".join(SPECS)).split()
    for spec in specs:
        for direction in ("encode", "decode"):
            call = Case(spec, direction, 1, FUSED, NUMEL).on(new_tensors(NUMEL, device))
            torch.cuda.synchronize()
            call()
            torch.cuda.synchronize()
    return Result(True, [f"{len(specs)} compressors have run"])


def profile(budget: Budget) -> Result:
    """Run :func:`run_calls` under ``ncu``; the result is a table of its findings."""
    path = found("ncu", *PLACES)
    if path is None:
        return Result(True, ["not profiled: ncu is not installed"])
    command = [path, "--clock-control", "none", "--kernel-name", OURS, "--metrics", ",".join(METRICS.values())]
    command += ["--csv", "--page", "raw", sys.executable, *python_arguments(sys.argv[0]), "--only", "calls"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=budget.left_s, check=False)
    except subprocess.TimeoutExpired:
        return Result(False, ["out of time: name fewer compressors in BENCH_PROFILED"])
    print(answer.stdout, answer.stderr, sep="\n", flush=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 3:  # names, units, launches
        return Result(True, [f"not profiled: ncu ended with {answer.returncode}", *answer.stdout.splitlines()[-8:]])
    folder = results_folder("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.csv").write_text("\n".join(lines) + "\n")
    return Result(True, table(lines))


def table(lines: Sequence[str]) -> list[str]:
    """Lines of text with the metrics of every launch, given ncu's lines of CSV."""
    _, *launches = csv.DictReader(lines)  # the first row has units
    text = [f"{'kernel':<28}" + "".join(f"{name:>11}" for name in METRICS)]
    for row in launches:
        cells = "".join(f"{row.get(metric) or '?':>11}" for metric in METRICS.values())
        text.append(f"{row.get('Kernel Name', '?')[:27]:<28}{cells}")
    return [f"{len(launches)} launches profiled", *text]
