"""A first check of a GPU: the machine, whether kernels compile and their bits are right, and its bandwidth.

    make gpu-light                          # all parts, in less than four minutes
    make gpu-light PARTS="bandwidth bits"   # some of them
    make gpu-light OUT=/some/folder         # instead of bench/results/cuda

The parts, the seconds that each may take and the files that they write: ``machine`` (20, ``machine.json``), ``compile``
(80, ``compiled.csv``; fills Triton's cache on all cores), ``bits`` (90, ``bits.csv``; every compressor against the host
path, first what training launches), ``memcheck`` (80) and ``bandwidth`` (30, ``bandwidth.csv``). Work that no longer
fits is left out, and said so. ``gpu_light.log`` has the output of all parts, ``gpu_light.txt`` the final table.
"""

from __future__ import annotations

import sys

from bench.gpu import bandwidth, bits, compilation, machine, memcheck
from bench.gpu.parts import Part, Result, main
from bench.lib.budget import Budget

BUDGET_S = 215.0  # the rest of the four minutes is for starting Python and finding the GPU


def compile_kernels(budget: Budget) -> Result:
    """Compile every kernel that ``bits`` launches, in the same order."""
    launches = []
    for task in bits.in_order():
        for shape in bits.shapes_of(task):
            launches += bits.launches(task, *shape)
    return compilation.compile_all(launches, budget)


PARTS = (
    Part("machine", machine.describe, max_s=20, min_s=5),
    Part("compile", compile_kernels, max_s=80),
    Part("bits", bits.measure, max_s=90, min_s=20),
    Part("memcheck", memcheck.check, max_s=80, min_s=25),
    Part("bandwidth", bandwidth.measure, max_s=30, min_s=15),
    Part("kernels", memcheck.run_kernels, max_s=30, on_request=True),
)

if __name__ == "__main__":
    sys.exit(main("gpu_light", PARTS, BUDGET_S))
