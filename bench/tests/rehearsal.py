"""Rehearsal of a GPU target without a GPU: ``python -m bench.tests.rehearsal light``, then the target's arguments.

Kernels are interpreted, and sizes are tiny. The target runs its parts as processes of this module, so that the settings
below hold in all of them; the environment variable ``REHEARSED`` names the target.
"""

# ruff: noqa: E402  the interpreter and the fake GPU must be installed before anything imports Triton

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

os.environ["TRITON_INTERPRET"] = "1"
if "compile" in sys.argv:  # this part really compiles kernels
    del os.environ["TRITON_INTERPRET"]
if "REHEARSED" not in os.environ:
    os.environ["REHEARSED"] = sys.argv.pop(1)
sys.path.append(str(ROOT / "tests" / "support"))

import torch

from bench.tests import fake_cuda

cuda = fake_cuda.installed()
cuda.__enter__()

import conftest  # noqa: F401  fixes the interpreter of Triton 3.6
import gckernels
from bench.gpu import bandwidth, bits, compilation, low_rank, memcheck
from bench.kernels import batch, gpu_kernels, powersgd, topk
from gckernels import EFSignSGD
from gckernels.toolkit.quantizer.launches import QuantizerTriton


class _Dying(QuantizerTriton):
    def bind_encodes(self, *arguments: object) -> None:
        os._exit(7)


class _Breaking(QuantizerTriton):
    def bind_encodes(self, *arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Dies(EFSignSGD):
    """A compressor whose kernel ends the process."""

    triton = _Dying()


class Breaks(EFSignSGD):
    """A compressor whose kernel breaks the connection to the GPU."""

    triton = _Breaking()


def architecture_here() -> int:
    """A capability, without asking Triton for a GPU."""
    return 90


compilation.architecture_here = architecture_here
target = importlib.import_module(f"bench.gpu.{os.environ['REHEARSED']}")
bandwidth.SIZES_NBYTES = (2**12, 2**18)
bits.SHAPES, bits.MORE_SHAPES = ((1, torch.bfloat16),), ((40, torch.float32),)
low_rank.METHODS = {"PowerSGD(rank=4)": 4}
bits.NUM_PROCESSES = 1
few = [gckernels.from_spec(spec) for spec in ("EFSignSGD", "RandomK")]
bits.DEFAULTS = {compressor.name: compressor for compressor in few}
bits.CONFIGURATIONS = dict(bits.DEFAULTS)
if "FAULTS" in os.environ:
    bits.CONFIGURATIONS = {"Dies": Dies(), "Breaks": Breaks(), **bits.CONFIGURATIONS}
    bits.DEFAULTS = {}
    low_rank.METHODS = {}
memcheck.SPECS = ("EFSignSGD",)
memcheck.NUMEL = 40
gpu_kernels.BANDWIDTH_SIZES = ((2**10, "float32"), (2**10, "bfloat16"))
gpu_kernels.LARGE_NUMEL = gpu_kernels.PEER_NUMEL = 2**11
gpu_kernels.LARGE_SPECS = gpu_kernels.REFERENCES = ("EFSignSGD",)
gpu_kernels.all_specs = lambda: ["EFSignSGD", "DGC"]
torch.compile = lambda function, **options: function  # inductor would look for the card
gpu_kernels.PEER_S = gpu_kernels.CASE_S = 0.0
topk.NUMEL, topk.ROUNDS, topk.SPECS = 1000, 2, ("TopK", "ChunkTopK")
batch.SPECS, batch.ROUNDS, batch.WARM_UP = ("BlockQuant",), 2, 0
batch.resnet50.sizes = lambda: iter((1000, 2**15))
powersgd.SHAPES, powersgd.GPU_RANKS, powersgd.ROUNDS = ((64, 32),), (4,), 2

if __name__ == "__main__":
    sys.exit(target.main(f"gpu_{os.environ['REHEARSED']}", target.PARTS, target.BUDGET_S))
