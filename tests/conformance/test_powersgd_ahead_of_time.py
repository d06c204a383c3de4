"""The kernels of PowerSGD compile for all targets, and keep what they work on in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, multiprocessing, sys
import torch
from gckernels.ops import powersgd_kernels as kernels
from gckernels.toolkit.aot import TARGETS, compile_launch
from gckernels.toolkit.launch import record_launches

def launches():
    for rank in (4, 32):
        for dtype in (torch.float32, torch.bfloat16):
            rows, cols = 100, 300
            grads, residuals = [torch.zeros(rows * cols, dtype=dtype)], [torch.zeros(rows * cols)]
            left, right = [torch.zeros(rank, rows)], [torch.zeros(rank, cols)]
            kernels.left(grads, residuals, right, left, 0.5)
            kernels.right(grads, residuals, left, right, 0.5)
            kernels.reconstruct(left, right, grads, residuals)
        kernels.orthogonalise(left, None)
        kernels.orthogonalise(left, [1])
        kernels.keep(left, [torch.zeros(rank, rows)])
        kernels.keep(left, [])

def compiled(capability):
    with record_launches() as recorded:
        launches()
    unique = {}
    for launch in recorded:
        constants = tuple(sorted((name, str(value)) for name, value in launch.constexprs.items()))
        unique.setdefault((launch.kernel.__name__, constants), launch)
    return [
        (name, str(dict(constants)), capability, found.stack_nbytes, found.local_loads + found.local_stores)
        for (name, constants), launch in unique.items()
        for found in [compile_launch(launch, capability)]
    ]

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        json.dump([row for rows in pool.map(compiled, TARGETS) for row in rows], sys.stdout)
"""


@pytest.mark.timeout(600)
def test_kernels_compile_without_spills():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert script.returncode == 0, script.stderr
    found = json.loads(script.stdout)
    assert len({name for name, *_ in found}) == 6 and len({capability for _, _, capability, *_ in found}) == 3
    spilled = [row for row in found if row[3]]
    assert not spilled, "\n".join(map(str, spilled))
