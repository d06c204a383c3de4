"""Kernels compiled on all cores at once, so that what comes after finds them in Triton's cache.

Recorded launches are compiled, specialised as the launches would be. The cache's folder is Triton's own, or that of
``TRITON_CACHE_DIR``. Nothing here touches the GPU. Writes ``compiled.csv``: a row per kernel, with the time it took
and, where it does not compile, the reason.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu.parts import Result
from bench.lib import nvidia_smi
from bench.lib.budget import Budget
from bench.lib.record import write_csv
from gckernels.testing.aot import specialize
from gckernels.toolkit.kernels.launch import Launch

HOPPER = 90  # where nvidia-smi is silent
SHOWN = 12  # failures in the summary

_launches: list[Launch] = []  # what the processes compile: they are forked, and get indices


def capability() -> int:
    """The GPU's compute capability, 90 for 9.0; asked of ``nvidia-smi``, so that this process can be forked."""
    text = nvidia_smi.query("compute_cap").get("compute_cap", "")
    return int(text.replace(".", "")) if text else HOPPER


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """The first launch of every kernel, specialised and with its options."""
    found: dict[tuple[str, ...], Launch] = {}
    for launch in launches:
        if 0 not in launch.grid:
            key = (launch.kernel.__module__, launch.kernel.__name__, *map(str, specialize(launch, HOPPER)))
            found.setdefault((*key, str(launch.options)), launch)
    return list(found.values())


def compile_all(launches: Iterable[Launch], budget: Budget) -> Result:
    """Compile the distinct kernels of ``launches``, and tell which fail. The process must be without
    ``TRITON_INTERPRET``."""
    global _launches
    _launches = distinct(launches)
    where = capability()
    rows: list[dict[str, Any]] = []
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        answers = pool.imap_unordered(_compile, [(index, where) for index in range(len(_launches))])
        while len(rows) < len(_launches):
            try:
                rows.append(answers.next(timeout=budget.left_s))
            except multiprocessing.TimeoutError:
                budget.left_out.append(f"{len(_launches) - len(rows)} kernels")
                break
    cuda = torch.device("cuda")
    write_csv("compiled", cuda, sorted(rows, key=lambda row: (row["kernel"], row["specialization"])))
    failed = [row for row in rows if row["error"]]
    spent_s = sum(float(row["seconds"]) for row in rows)
    lines = [f"{len(rows) - len(failed)} of {len(_launches)} kernels compiled for sm_{where}, {spent_s:.0f} s of CPU"]
    lines += [f"{row['kernel']}: {row['error']}" for row in failed[:SHOWN]]
    return Result(not failed, lines)


def source(launch: Launch, where: int) -> ASTSource:
    """The kernel as the launch would hand it to the compiler, for compute capability ``where``."""
    return ASTSource(launch.kernel, *specialize(launch, where))


def _compile(task: tuple[int, int]) -> dict[str, Any]:
    index, where = task
    launch = _launches[index]
    started, error = time.monotonic(), ""
    kernel = source(launch, where)
    try:
        triton.compile(kernel, target=GPUTarget("cuda", where, 32), options=launch.options)
    except Exception as problem:  # whatever the compiler raises is what this is to tell
        error = f"{type(problem).__name__}: ... {' '.join(str(problem).split())[-250:]}"  # its end is the reason
    specialization = " ".join(f"{name}={value}" for name, value in (kernel.signature | launch.constexprs).items())
    return {
        "kernel": f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}",
        "specialization": specialization[:300],
        "seconds": f"{time.monotonic() - started:.2f}",
        "error": error,
    }
