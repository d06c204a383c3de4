"""The kernels of PowerSGD compile for all targets, and keep what they work on in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gckernels.toolkit.aot import TARGETS

COMPILE = """
import json, sys
import torch
from gckernels.ops import powersgd_kernels as kernels
from gckernels.toolkit.aot import compile_launches
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

with record_launches() as recorded:
    launches()
work = [(launch, capability) for capability in json.loads(sys.argv[1]) for launch in recorded]
found = [
    (each.kernel, str(launch.constexprs), capability, each.stack_nbytes, each.local_loads + each.local_stores)
    for (launch, capability), each in zip(work, compile_launches(work))
]
json.dump(found, sys.stdout)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("targets", [(90,), pytest.param(TARGETS, marks=pytest.mark.slow)], ids=str)
def test_kernels_compile_without_spills(targets):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(targets)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == 0, script.stderr
    found = json.loads(script.stdout)
    assert len({name for name, *_ in found}) == 6 and {capability for _, _, capability, *_ in found} == {*targets}
    spilled = [row for row in found if row[3]]
    assert not spilled, "\n".join(map(str, spilled))
