"""Every measurement on a GPU, in less than nine minutes.

    make bench-gpu                          # all parts
    make bench-gpu PARTS="kernels topk"     # some of them, measured anew
    make bench-gpu OUT=/some/folder         # instead of bench/results/cuda

The parts and the files that they write, the most important part first:

- ``compile`` (``compiled.csv``): compiles the kernels of all parts on all cores;
- ``kernels`` (``microbench.csv``, see ``kernels/microbench.py``): every compressor against a copy, and the cost of a
  call to the host;
- ``topk`` (``topk.csv``): sparsifiers against ``torch.topk``;
- ``peers`` (also ``microbench.csv``): compressors beside their references in plain torch, compiled and eager, and
  beside the quantisers of torchft and torchao, stated again;
- ``batch`` (``batch.csv``): a step over all units of a model;
- ``powersgd`` (``powersgd.csv``): the stages of PowerSGD against matrix products;
- ``profile``, only if named (``profile.csv``, see ``gpu/counters.py``): how busy pipes and memory are in a few kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from bench.gpu import compilation, counters
from bench.gpu.parts import Part, Result, main
from bench.kernels import batch, gpu_kernels, powersgd, topk
from bench.lib.budget import Budget
from bench.lib.cases import FUSED, Case
from bench.lib.record import read_csv
from bench.lib.sweep import Sweep
from bench.lib.timings import KEY, Recorder
from harness.machine_code.launches import launches_of_powersgd

BUDGET_S = 515.0  # the rest of the nine minutes is for starting Python and finding the GPU


def compile_kernels(budget: Budget) -> Result:
    """Compile the kernels of all parts, those of the part ``kernels`` first, up to a few of ``batch``."""
    cases = gpu_kernels.bandwidth_cases()
    cases += [Case(spec, "encode", 1, FUSED, topk.NUMEL) for spec in topk.SPECS]
    launches = [launch for case in cases for launch in case.launches()]
    for rank in powersgd.GPU_RANKS:
        for shape in powersgd.SHAPES:
            launches += launches_of_powersgd(torch.float32, *shape, rank)
    return compilation.compile_all(launches, budget)


def kernels(budget: Budget) -> Result:
    """Measure throughput relative to a copy, and the cost of a call to the host."""
    rows = _measured(gpu_kernels.bandwidth_cases(), budget)
    return Result(bool(rows), [*_notes(rows), *gpu_kernels.table(rows)])


def peers(budget: Budget) -> Result:
    """Measure compressors against their references in plain torch."""
    rows = _measured(gpu_kernels.peer_cases(), budget)
    return Result(bool(rows), [*_notes(rows), *gpu_kernels.factors(rows)])


def _measured(cases: list[Case], budget: Budget) -> list[dict[str, str]]:
    """Measure ``cases`` and return their rows; other rows of the file stay."""
    recorder = Recorder(torch.device("cuda"), keep=True)
    gpu_kernels.Bench(recorder).run(cases, budget)
    keys = {tuple(map(str, (c.spec, c.direction, c.sources, c.implementation, c.numel, c.dtype, ""))) for c in cases}
    return [row for row in read_csv(recorder.path) if tuple(row[column] for column in KEY) in keys]


def _notes(rows: list[dict[str, str]]) -> list[str]:
    failed = [row for row in rows if row["note"]]
    lines = [f"{len(rows) - len(failed)} cases measured, {len(failed)} not measured"]
    return lines + [f"{row['compressor']} {row['direction']} {row['numel']}: {row['note'][:200]}" for row in failed[:8]]


def swept(sweep: Sweep, *columns: str) -> Callable[[Budget], Result]:
    """The work of a part: a function that measures a sweep; its result is a table of these columns."""

    def work(budget: Budget) -> Result:
        rows = sweep.measure(torch.device("cuda"), budget)
        lines = [columns, *([str(row[column]) for column in columns] for row in rows)]
        return Result(
            bool(rows), [f"{len(rows)} rows", *("  ".join(map("{:<14}".format, each)).rstrip() for each in lines)]
        )

    return work


TOPK = swept(topk.SWEEP, "compressor", "median_s", "torch_topk_s", "times_as_fast")
BATCH = swept(batch.SWEEP, "compressor", "units", "arm", "median_host_s", "median_s")
POWERSGD = swept(powersgd.SWEEP, "rows", "cols", "rank", "median_s", "products_s", "ratio")

PARTS = (
    Part("compile", compile_kernels, max_s=70),
    Part("kernels", kernels, max_s=230, min_s=30),
    Part("topk", TOPK, max_s=30, min_s=15),
    Part("peers", peers, max_s=110, min_s=30),
    Part("batch", BATCH, max_s=40, min_s=15),
    Part("powersgd", POWERSGD, max_s=50, min_s=15),
    Part("profile", counters.profile, max_s=300, on_request=True),
    Part("calls", counters.run_calls, max_s=60, on_request=True),
)

if __name__ == "__main__":
    sys.exit(main("gpu_bench", PARTS, BUDGET_S))
