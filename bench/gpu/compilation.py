"""Parallel compilation of recorded launches on all cores, so that later parts find kernels in Triton's cache.

Kernels are specialised as the launches would be. The cache is Triton's own folder or ``TRITON_CACHE_DIR``. The GPU is
not used. Writes ``compiled.csv``: a row per kernel with its compile time or the compiler's error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

from bench.gpu.parts import Result
from bench.lib import nvidia_smi
from bench.lib.budget import Budget
from bench.lib.record import write_csv
from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code.aot import compiling_for, specialize

HOPPER = 90  # assumed where nvidia-smi reports no compute capability
MAX_SHOWN = 12  # failures in the summary

_launches: list[Launch] = []  # to compile; the forked workers inherit the list and receive indices


def capability() -> int:
    """The GPU's compute capability, 90 for 9.0, as ``nvidia-smi`` reports it: using CUDA would rule out forking."""
    text = nvidia_smi.query("compute_cap").get("compute_cap", "")
    return int(text.replace(".", "")) if text else HOPPER


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """The first launch of every distinct combination of kernel, specialisation and options."""
    first_launches: dict[tuple[str, ...], Launch] = {}
    for launch in launches:
        if 0 not in launch.grid:
            key = (launch.kernel.__module__, launch.name, *map(str, specialize(launch, HOPPER)))
            first_launches.setdefault((*key, str(launch.options)), launch)
    return list(first_launches.values())


def compile_all(launches: Iterable[Launch], budget: Budget) -> Result:
    """Compile the distinct kernels of ``launches``; the result names those that fail.

    The environment must not have ``TRITON_INTERPRET`` set.
    """
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
    lines += [f"{row['kernel']}: {row['error']}" for row in failed[:MAX_SHOWN]]
    return Result(not failed, lines)


def source(launch: Launch, where: int) -> ASTSource:
    """The compiler's input for the kernel of ``launch``, for compute capability ``where``."""
    return ASTSource(launch.kernel, *specialize(launch, where))


def _compile_launcher(kernel: ASTSource, metadata: Any) -> None:
    """Compile the C code that launches a kernel: Triton 3.6 has one for every signature, Triton 3.7 one for all."""
    if hasattr(driver, "make_launcher"):
        with contextlib.suppress(Exception):  # the first launch raises it
            driver.CudaLauncher(kernel, metadata)


def _compile(task: tuple[int, int]) -> dict[str, Any]:
    index, where = task
    launch = _launches[index]
    started, error = time.monotonic(), ""
    kernel = source(launch, where)
    try:
        with compiling_for(GPUTarget("cuda", where, 32)) as target:
            compiled = triton.compile(kernel, target=target, options=launch.options)
        _compile_launcher(kernel, compiled.metadata)
    except Exception as problem:  # any error is reported
        error = f"{type(problem).__name__}: ... {' '.join(str(problem).split())[-250:]}"  # the reason comes last
    specialization = " ".join(f"{name}={value}" for name, value in (kernel.signature | launch.constexprs).items())
    return {
        "kernel": f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.name}",
        "specialization": specialization[:300],
        "seconds": f"{time.monotonic() - started:.2f}",
        "error": error,
    }
