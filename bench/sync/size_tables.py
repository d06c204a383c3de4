"""How long the sizes of a large model's units take, in all programs, on one core.

    python -m bench.sync.size_tables

Payload and wire bytes of every state of the 174 programs on 8 machines of 8, for 314 units of which no two have the
same size. Reported are milliseconds of the processor's time: ``enumerate_ms`` finds the programs, ``first_ms`` is the
first table of a compressor, for which programs are taken through their rules, and ``table_ms`` the median of later
ones.
"""

from __future__ import annotations

import statistics
import time

import torch

import gckernels
from bench.lib.record import merge_csv
from gckernels import sync
from gckernels.sync.programs import enumeration
from gckernels.sync.programs.size_tables import size_table

TOPOLOGY = sync.Topology(8, 8)
UNITS = 314
REPETITIONS = 30
SPECS = ("EFSignSGD", "BlockQuant", "TopK", "ChunkTopK")
KEY = ("compressor",)


def milliseconds(compressor: str, programs: tuple[sync.Program, ...]) -> float:
    """The time of one table."""
    numels = [1000 + 12_347 * index for index in range(UNITS)]
    start = time.process_time()
    size_table(programs, numels, torch.float32, gckernels.from_spec(compressor), TOPOLOGY)
    return (time.process_time() - start) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    enumeration._skeletons.cache_clear()
    start = time.process_time()
    programs = sync.enumerate_programs(TOPOLOGY)
    enumerated = (time.process_time() - start) * 1e3
    rows = []
    for spec in SPECS:
        first, *later = [milliseconds(spec, programs) for _ in range(1 + REPETITIONS)]
        rows.append(
            {
                "compressor": spec,
                "programs": len(programs),
                "units": UNITS,
                "repetitions": REPETITIONS,
                "enumerate_ms": f"{enumerated:.1f}",
                "first_ms": f"{first:.1f}",
                "table_ms": f"{statistics.median(later):.2f}",
            }
        )
        print(rows[-1])
    print("wrote", merge_csv("size_tables", torch.device("cpu"), rows, KEY))


if __name__ == "__main__":
    main()
