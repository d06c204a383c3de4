"""The first minutes on a GPU: what it is, its bandwidth, whether kernels compile, and whether their bits are right.

    make gpu-light                          # all parts, in less than four minutes
    make gpu-light PARTS="bandwidth bits"   # some of them
    make gpu-light OUT=/some/folder         # instead of bench/results/cuda

The parts, each with its file: ``machine`` (``machine.json``), ``compile`` (``compiled.csv``; it fills Triton's cache on
all cores), ``bandwidth`` (``bandwidth.csv``), ``bits`` (``bits.csv``: every compressor against the host path) and
``memcheck``. The output of all parts is in ``gpu_light.log``, the table at the end in ``gpu_light.txt``.
"""

from __future__ import annotations

import sys

from bench.gpu import bandwidth, bits, compilation, machine, memcheck
from bench.gpu.parts import Part, Result, main
from bench.lib.budget import Budget
from gckernels.testing.configurations import CONFIGURATIONS

BUDGET_S = 215.0  # the rest of the four minutes goes into starting Python and finding the GPU


def compile_kernels(budget: Budget) -> Result:
    """Every kernel that ``bits`` launches, in the same order."""
    launches = []
    for spec in bits.in_order():
        for numel in bits.SIZES:
            for dtype in bits.DTYPES:
                launches += bits.launches(CONFIGURATIONS[spec], numel, dtype)
    return compilation.compile_all(launches, budget)


PARTS = (
    Part("machine", machine.describe, most_s=20, least_s=5),
    Part("compile", compile_kernels, most_s=80),
    Part("bandwidth", bandwidth.measure, most_s=30, least_s=15),
    Part("bits", bits.measure, most_s=90, least_s=20),
    Part("memcheck", memcheck.check, most_s=80, least_s=25),
    Part("kernels", memcheck.run_kernels, most_s=30, on_request=True),
)

if __name__ == "__main__":
    sys.exit(main("gpu_light", PARTS, BUDGET_S))
