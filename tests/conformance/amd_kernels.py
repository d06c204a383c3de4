"""Assemble all kernels for an AMD GPU and print the facts about them as JSON.

    python amd_kernels.py gfx942

This is a script, because it needs a process without ``TRITON_INTERPRET``; ``test_amd.py`` runs it.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys

import torch

from gckernels import Codec
from gckernels.testing.configurations import CONFIGURATIONS
from gckernels.toolkit.kernels import launch as launching
from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code.aot import assemble_for_amd, specialize
from harness.machine_code.launches import (
    calls_of_many,
    calls_of_one,
    calls_with_encoded_residuals,
    has_batches,
    launches_of_powersgd,
    waits,
)

# dtype, elements, chunks, sources; sparsifiers select in small chunks with a kernel of their own
SHAPES = (torch.float32, 2**13, 4, 3), (torch.float32, 2**20, 4, 3)


def launches(compressor: Codec) -> list[Launch]:
    calls = []
    for shape in SHAPES:
        calls += calls_of_one(compressor, *shape, accumulate=False)
        calls += calls_with_encoded_residuals(compressor, *shape)
        if has_batches(compressor):
            calls += calls_of_many(compressor, *shape)
    return [launch for _, _, recorded in calls for launch in recorded]


def facts(number: int) -> dict[str, object]:
    """The configuration and name of a kernel, its spilled registers, and whether its threads may exchange values
    through global memory. Then its waits for memory: all of them, and those with a barrier and no access behind."""
    spec, launch = _kernels[number]
    assembly = assemble_for_amd(launch, sys.argv[1])
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)  # scalar registers are spilled into vector registers
    return {
        "spec": spec,
        "kernel": launch.name,
        "num_warps": launch.num_warps,
        "spilled": sum(map(int, spilled)),
        "counts": len(spilled),
        "exchanges": bool(waits(launch)),
        "waits": assembly.count("#ASMSTART"),
        "waiting_barriers": sum(not _ACCESS.search(between) for between in _WAIT.findall(assembly)),
    }


_WAIT = re.compile(r"#ASMSTART\s+s_waitcnt vmcnt\(0\)(.*?)\bs_barrier\b", re.DOTALL)
_ACCESS = re.compile(r"^\s+(buffer|global|flat)_", re.MULTILINE)
_kernels: list[tuple[str, Launch]] = []


def main() -> None:
    launching.BACKEND = "hip"
    recorded = [(spec, launch) for spec, each in CONFIGURATIONS.items() for launch in launches(each)]
    for rank in (4, 32):
        powersgd = launches_of_powersgd(torch.float32, 100, 304, rank)
        recorded += [(f"PowerSGD(rank={rank})", launch) for launch in powersgd]
    different: dict[tuple[object, ...], tuple[str, Launch]] = {}
    for spec, launch in recorded:
        different[launch.kernel, str(specialize(launch, sys.argv[1])), str(launch.options_for("hip"))] = spec, launch
    _kernels[:] = different.values()
    with multiprocessing.get_context("fork").Pool() as pool:
        found = pool.map(facts, range(len(_kernels)), 1)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
