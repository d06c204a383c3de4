"""The host's time per launch: bound launches against launchers that are called in every step.

    python -m bench.kernels.launch_cost

Triton uses a driver that launches nothing, so no GPU is needed. The measured time is that of Python up to the driver,
and of torch allocating or zeroing memory on the CPU; the driver's own time comes on top. The results are processor
times of the calling thread, the minimum over several rounds, for a step of one unit: ``unbound_us`` for
``encode`` and ``decode`` of the Triton back end, ``bound_us`` for a bound batch, and ``bound_us_per_launch``, which
should be at most 10. Units of 16 Ki elements share launches with others if the compressor supports it; units of 4 Mi
elements are launched separately. Writes ``bench/results/cpu/launch_cost.csv``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

import gckernels
from bench.lib import fake_driver
from bench.lib.record import write_csv
from gckernels.compressor import Decoding, Encoding
from gckernels.toolkit.kernels.launch import record_launches

# compressors whose units take one or two launches, and others
FEW = ("Cast16", "EFSignSGD", "EFSignSGD(block=None)", "BlockQuant", "TernGrad", "ChunkTopK", "RandomK")
SPARSIFIERS = ("TopK", "DGC")
SPECS = (*FEW, *SPARSIFIERS)
SIZES = (2**14, 2**22)
MAX_BOUND_US = 10.0
ROUNDS, CALLS = 7, 200


def min_us(step: Callable[[], None], rounds: int, calls: int) -> float:
    """Processor time of a call in microseconds, the minimum over ``rounds`` of the mean over ``calls``."""
    for _ in range(3):
        step()
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            step()
        best = min(best, time.thread_time() - start)
    return best / calls * 1e6


def steps(compressor: gckernels.Compressor, numel: int) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Yield ``(name, unbound step, bound step)`` for encode and decode."""
    grad, out = torch.empty(numel), torch.empty(numel)
    residual = torch.empty(compressor.traits.states * numel) if compressor.traits.needs_feedback else None
    payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
    triton = compressor.triton
    added = torch.zeros(1, dtype=torch.int64)
    encodes = triton.bind_encodes([Encoding(compressor, grad, residual, payload, 5, numel)], 1.0, added)
    decodes = triton.bind_decodes([Decoding(compressor, payload[None], out, numel)], 1.0, False)
    yield (
        "encode",
        lambda: triton.encode(Encoding(compressor, grad, residual, payload, 12, numel)),
        encodes,
    )
    yield "decode", lambda: triton.decode(Decoding(compressor, payload[None], out, numel)), decodes


def rows(specs: tuple[str, ...], rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    for spec in specs:
        for numel in SIZES:
            for call, unbound, bound in steps(gckernels.from_spec(spec), numel):
                with record_launches() as recorded:
                    bound()
                bound_us = min_us(bound, rounds, calls)
                yield {
                    "compressor": spec,
                    "call": call,
                    "elements": numel,
                    "launches": len(recorded),
                    "unbound_us": f"{min_us(unbound, rounds, calls):.1f}",
                    "bound_us": f"{bound_us:.1f}",
                    "bound_us_per_launch": f"{bound_us / len(recorded):.1f}",
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, help="compressors")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS, help="calls per round")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    fake_driver.install()
    table = []
    for row in rows(tuple(arguments.specs), arguments.rounds, arguments.calls):
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
        table.append(row)
    slow = [row for row in table if float(row["bound_us_per_launch"]) > MAX_BOUND_US]
    print(f"{len(table) - len(slow)} of {len(table)} take at most {MAX_BOUND_US:.0f} us for a bound launch")
    if not arguments.dry:
        print("written:", write_csv("launch_cost", torch.device("cpu"), table))


if __name__ == "__main__":
    main()
