"""Throughput of encode and decode, against the copy bandwidth of the same minute.

    python bench/kernels.py                                        # the host path, timed by pytest-benchmark
    python bench/kernels.py --device cuda                          # the kernels, timed by triton.testing.do_bench
    python bench/kernels.py --compressors EFSignSGD --sizes 4Mi    # replaces just these rows of the results

Writes ``bench/results/<device type>/microbench.csv``: a row per case of ``cases.py``, on the host two, with one thread
and with as many as torch takes by default. The columns:

- ``gb_per_s``: the fewest bytes that must move (``moved_nbytes``) over the median time;
- ``copy_gb_per_s``: reads and writes of a copy of 64 MiB, measured between the rounds of the case on the host, before
  and after the case on a GPU; ``percent_of_copy`` relates the two. Rows of the compressor ``copy`` are copies of
  the row's own size, against the same yardstick: a small one stays in the caches and exceeds 100 percent;
- ``host_us_per_call``: at 16 Ki elements and below, what a call costs the calling thread, in microseconds: on the host
  the whole call, on a GPU putting it into the stream;
- ``factor_over_eager``: the time of the compressor's reference in plain torch (rows ``eager torch``) over the time of
  this row; at 4 Mi elements only;
- ``note``: why there is no number, where there is none.

Small sizes are measured with warm caches on the host and with a cold L2 cache on a GPU, as ``do_bench`` does it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.testing
from cases import CUDA_NUMEL, EAGER, HOST_NUMEL, Case, all_cases, all_specs, tensors, yardstick
from sizes import parse_numel
from timings import OVERHEAD_NUMEL, Recorder, Timing

import gckernels


def run_on_gpu(cases: Sequence[Case], recorder: Recorder) -> None:
    """Measure ``cases`` one after the other."""
    size = None
    for case in cases:
        if case.numel != size:  # give the memory of the last size back before the next one is allocated
            tensors.cache_clear()
            torch.cuda.empty_cache()
            size = case.numel
        for each in (case.eager(), case):  # the reference first: the row of the case refers to it
            if each:
                measure_on_gpu(each, recorder)


def measure_on_gpu(case: Case, recorder: Recorder) -> None:
    """Add the row of ``case``, with its timing or the reason why there is none."""
    note = recorder.shortage(case)
    if note:
        recorder.add(case, "", None, note)
        return
    call = case.prepare(recorder.device)
    fault = eager_fault(call, recorder.device) if case.implementation == EAGER else None
    if fault:
        recorder.add(case, "", None, fault)
    else:
        host_s = seconds_to_enqueue(call) if case.numel <= OVERHEAD_NUMEL else None
        timing = time_on_gpu(call, yardstick(recorder.device))
        recorder.add(case, "", dataclasses.replace(timing, host_s=host_s))


def eager_fault(call: Callable[[], Any], device: torch.device) -> str | None:
    """Why a reference cannot be timed on ``device``: it fails there, or does its work on another one."""
    try:
        result = call()
    except (RuntimeError, TypeError) as error:  # what torch raises when the devices of its arguments differ
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"not measured: the reference fails on {device.type}: {what}"
    parts = result if isinstance(result, tuple) else (result,)
    if any(part.device.type != device.type for part in parts):
        return f"not measured: the reference computes on the CPU, not on {device.type}"
    return None


def time_on_gpu(call: Callable[[], Any], copy: Callable[[], Any]) -> Timing:
    """Quartiles of ``call``, between two medians of ``copy``."""
    before_ms = triton.testing.do_bench(copy, return_mode="median")
    low_ms, middle_ms, high_ms = triton.testing.do_bench(call, quantiles=[0.25, 0.5, 0.75])
    after_ms = triton.testing.do_bench(copy, return_mode="median")
    return Timing(low_ms / 1e3, middle_ms / 1e3, high_ms / 1e3, (before_ms + after_ms) / 2 / 1e3)


def seconds_to_enqueue(call: Callable[[], Any], calls: int = 100, rounds: int = 7) -> float:
    """Seconds that a call keeps the host busy; so few calls that the stream's queue does not fill and block."""
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help='such as "EFSignSGD(block=1024)"')
    parser.add_argument("--sizes", nargs="+", type=parse_numel, metavar="NUMEL", help="elements, such as 16Ki or 4Mi")
    options = parser.parse_args(arguments)
    for spec in options.compressors or ():
        gckernels.from_spec(spec)  # raises now, not after minutes
    device = torch.device(options.device)
    cases = all_cases(
        options.compressors or all_specs(), options.sizes or (CUDA_NUMEL if device.type == "cuda" else HOST_NUMEL)
    )
    partial = options.compressors is not None or options.sizes is not None
    recorder = Recorder(device, keep=partial)
    torch.manual_seed(0)
    code = 0
    if device.type == "cuda":
        run_on_gpu(cases, recorder)
    else:
        from host_kernels import run_on_host  # needs pytest-benchmark, which a machine with a GPU may lack

        code = run_on_host(cases, recorder)
    print("written:", recorder.path.name)
    return code


if __name__ == "__main__":
    sys.exit(main())
