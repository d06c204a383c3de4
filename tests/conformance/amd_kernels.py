"""Assemble the kernels of casts, quantisers and PowerSGD for an AMD GPU and print the facts about them as JSON.

    python amd_kernels.py [--quick]

With ``--quick`` every kernel is assembled once, for few configurations.

This is a script, because it needs a process without ``TRITON_INTERPRET``; ``test_amd.py`` runs it.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys

import torch

from gckernels import Compressor
from gckernels.testing.aot import AMD, assemble_for_amd, specialize
from gckernels.testing.configurations import CONFIGURATIONS
from gckernels.testing.launches import calls_of_many, calls_of_one, has_batches, launches_of_powersgd
from gckernels.toolkit.kernels import launch as launching
from gckernels.toolkit.kernels.launch import Launch

SHAPE = torch.float32, 2**20, 4, 3  # dtype, elements, chunks, sources
QUICK = ("Cast16", "TernGrad(block=None)")


def launches(compressor: Compressor) -> list[Launch]:
    calls = calls_of_one(compressor, *SHAPE, accumulate=False)
    if has_batches(compressor):
        calls += calls_of_many(compressor, *SHAPE)
    return [launch for _, _, recorded in calls for launch in recorded]


def facts(number: int) -> dict[str, object]:
    """The configuration, name and number of spilled registers of a kernel."""
    spec, launch = _kernels[number]
    assembly = assemble_for_amd(launch)
    spilled = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly)
    return {"spec": spec, "kernel": launch.kernel.__name__, "spilled": sum(map(int, spilled)), "counts": len(spilled)}


_kernels: list[tuple[str, Launch]] = []


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    compressors = {spec: CONFIGURATIONS[spec] for spec in (QUICK if quick else CONFIGURATIONS)}
    recorded = [(spec, launch) for spec, each in compressors.items() if has_batches(each) for launch in launches(each)]
    launching.BACKEND = "hip"
    for rank in (4,) if quick else (4, 32):
        powersgd = launches_of_powersgd(torch.float32, 100, 304, rank)
        recorded += [(f"PowerSGD(rank={rank})", launch) for launch in powersgd]
    different: dict[tuple[object, ...], tuple[str, Launch]] = {}
    for spec, launch in recorded:
        key = (launch.kernel,)
        if not quick:
            key += str(specialize(launch, AMD)), str(launch.options_for("hip"))
        different.setdefault(key, (spec, launch))
    _kernels[:] = different.values()
    with multiprocessing.get_context("fork").Pool() as pool:
        found = pool.map(facts, range(len(_kernels)), 1)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
