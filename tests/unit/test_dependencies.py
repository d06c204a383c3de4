"""What the package works without."""

from __future__ import annotations

import os
import subprocess
import sys

WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # an import of it fails

import torch
import gckernels
from gckernels import sync

for compressor in (cls() for cls in gckernels.COMPRESSORS.values()):
    grad, residual = torch.randn(5000), torch.zeros(compressor.states * 5000)
    payload = torch.empty(1, compressor.payload_nbytes(5000), dtype=torch.uint8)
    compressor.encode(grad, residual if compressor.needs_feedback else None, payload[0])
    out = torch.full((5000,), torch.nan)
    compressor.decode(payload, out, 1.0)
    assert out.isfinite().all(), compressor
"""


def test_everything_on_the_cpu_works_without_numpy():
    """NumPy is for the tests and the benchmarks, and torch does not bring it along."""
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # it needs NumPy
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr
