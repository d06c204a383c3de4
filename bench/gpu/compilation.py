"""Parallel compilation of recorded launches on all cores, so that later parts find kernels in Triton's cache.

Kernels are specialised as the launches would be, for the GPU that Triton finds, NVIDIA's or AMD's. The cache is
Triton's own folder or ``TRITON_CACHE_DIR``. Writes ``compiled.csv``: a row per kernel with its compile time or the
compiler's error.
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
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from triton.runtime import driver as runtime

from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.record import write_csv
from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code.aot import compiling_for, specialize, target_of

MAX_SHOWN = 12  # failures in the summary

_launches: list[Launch] = []  # to compile; the forked workers inherit the list and receive indices


def architecture_here() -> int | str:
    """The architecture that launches on this machine's GPU are compiled for: 90 for capability 9.0, or ``"gfx942"``.

    Raises:
        RuntimeError: Triton finds no GPU that it can compile for.
    """
    architecture: int | str = runtime.active.get_current_target().arch
    return architecture


def distinct(launches: Iterable[Launch], architecture: int | str) -> list[Launch]:
    """The first launch of every distinct combination of kernel, specialisation and options."""
    first_launches: dict[tuple[str, ...], Launch] = {}
    for launch in launches:
        if 0 not in launch.grid:
            key = (launch.kernel.__module__, launch.name, *map(str, specialize(launch, architecture)))
            first_launches.setdefault((*key, str(launch.options)), launch)
    return list(first_launches.values())


def compile_all(launches: Iterable[Launch], budget: Budget) -> Result:
    """Compile the distinct kernels of ``launches``; the result names those that fail.

    The environment must not have ``TRITON_INTERPRET`` set.
    """
    global _launches
    with multiprocessing.get_context("spawn").Pool(1) as other:  # using the GPU here would rule out forking
        try:
            where = other.apply(architecture_here)
        except RuntimeError as error:
            return Result(False, [f"nothing is compiled: Triton finds no GPU to compile for: {error}"])
    name = f"sm_{where}" if isinstance(where, int) else where
    _launches = distinct(launches, where)
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
    lines = [f"{len(rows) - len(failed)} of {len(_launches)} kernels compiled for {name}, {spent_s:.0f} s of CPU"]
    lines += [f"{row['kernel']}: {row['error']}" for row in failed[:MAX_SHOWN]]
    return Result(not failed, lines)


def source(launch: Launch, where: int | str) -> ASTSource:
    """The compiler's input for the kernel of ``launch``, for an architecture."""
    return ASTSource(launch.kernel, *specialize(launch, where))


def _compile_launcher(kernel: ASTSource, metadata: Any) -> None:
    """Compile the C code that launches a kernel: Triton 3.6 has one for every signature, Triton 3.7 one for all."""
    if hasattr(driver, "make_launcher"):
        with contextlib.suppress(Exception):  # the first launch raises it
            driver.CudaLauncher(kernel, metadata)


def _compile(task: tuple[int, int | str]) -> dict[str, Any]:
    index, where = task
    launch = _launches[index]
    started, error = time.monotonic(), ""
    kernel = source(launch, where)
    try:
        with compiling_for(target_of(where)) as target:
            compiled = triton.compile(kernel, target=target, options=launch.options_for(target.backend))
        if target.backend == "cuda":
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
