"""A search for accesses out of bounds: one kernel of every kind under NVIDIA's ``compute-sanitizer``."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import gckernels
from bench.gpu import bits
from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.program import found, python_arguments

SPECS = ("Cast16", "ChunkTopK", "EFSignSGD", "RandomK", "TernGrad(block=None)", "TopK")
NUMEL = 5000
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/compute-sanitizer")
ERRORS_FOUND = 9  # exit status of the tool when it has found errors
MAX_SHOWN = 10  # lines in the summary


def run_kernels(budget: Budget) -> Result:
    """Encode, decode and recode bound units as training does, with the kernels of every compressor of :data:`SPECS`."""
    device = torch.device("cuda")
    for spec in SPECS:
        compressor = gckernels.from_spec(spec)
        assert isinstance(compressor, gckernels.Codec)
        # filled on the CPU: torch's own kernels need no check
        for call in bits.bound_calls(compressor, NUMEL, torch.float32, torch.randn):
            call.work(compressor.triton, [bits.moved(unit, device) for unit in call.units], call.is_bound)()
        torch.cuda.synchronize()
        print(spec, "has run", flush=True)
    return Result(True, [f"{len(SPECS)} compressors have run"])


def check(budget: Budget) -> Result:
    """Run :func:`run_kernels` under ``memcheck``, without torch's caching allocator, which would hide errors."""
    sanitizer = found("compute-sanitizer", *PLACES)
    if sanitizer is None:
        return Result(True, ["not checked: compute-sanitizer is not installed"])
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(ERRORS_FOUND), "--print-limit", "20"]
    command += [sys.executable, *python_arguments(sys.argv[0]), "--only", "kernels"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=budget.left_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        completed = [line for line in _text(error.stdout).splitlines() if "has run" in line]
        return Result(True, [f"out of time: {len(completed)} of {len(SPECS)} compressors had run, without errors"])
    print(answer.stdout, answer.stderr, sep="\n", flush=True)
    lines = [line.strip("= ") for line in answer.stdout.splitlines() if line.startswith("=========")]
    if answer.returncode == 0:
        return Result(True, [f"memcheck has found no errors in {len(SPECS)} compressors"])
    if answer.returncode == ERRORS_FOUND:
        return Result(False, ["memcheck has found errors", *lines[:MAX_SHOWN]])
    last = (lines or answer.stderr.splitlines())[-MAX_SHOWN:]
    return Result(True, [f"not checked: memcheck ended with {answer.returncode}", *last])


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
