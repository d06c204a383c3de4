"""A first check of a GPU: the machine, its bandwidth, whether kernels compile, and whether their bits are right.

    make gpu-light                          # all parts, in less than four minutes
    make gpu-light PARTS="bandwidth bits"   # some of them
    make gpu-light OUT=/some/folder         # instead of bench/results/cuda

The parts and the files that they write: ``machine`` (``machine.json``), ``compile`` (``compiled.csv``; fills Triton's
cache on all cores), ``bandwidth`` (``bandwidth.csv``), ``bits`` (``bits.csv``; every compressor against the host path)
and ``memcheck``. ``gpu_light.log`` has the output of all parts, ``gpu_light.txt`` the final table.
"""

from __future__ import annotations

import sys

from bench.gpu import bandwidth, bits, compilation, machine, memcheck
from bench.gpu.parts import Part, Result, main
from bench.lib.budget import Budget
from gckernels.testing.configurations import CONFIGURATIONS

BUDGET_S = 215.0  # the rest of the four minutes is for starting Python and finding the GPU


def compile_kernels(budget: Budget) -> Result:
    """Compile every kernel that ``bits`` launches, in the same order."""
    launches = []
    for spec in bits.in_order():
        for numel in bits.SIZES:
            for dtype in bits.DTYPES:
                launches += bits.launches(CONFIGURATIONS[spec], numel, dtype)
    return compilation.compile_all(launches, budget)


PARTS = (
    Part("machine", machine.describe, max_s=20, min_s=5),
    Part("compile", compile_kernels, max_s=80),
    Part("bandwidth", bandwidth.measure, max_s=30, min_s=15),
    Part("bits", bits.measure, max_s=90, min_s=20),
    Part("memcheck", memcheck.check, max_s=80, min_s=25),
    Part("kernels", memcheck.run_kernels, max_s=30, on_request=True),
)

if __name__ == "__main__":
    sys.exit(main("gpu_light", PARTS, BUDGET_S))
