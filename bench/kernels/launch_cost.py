"""The host's time per launch: bound launches against launchers that are called in every step.

    python -m bench.kernels.launch_cost

Runs behind a driver that launches nothing, so it needs no GPU: what is measured is everything in Python up to the
driver, and of the calls of torch that allocate or zero memory what they take on the CPU. What the driver itself takes
comes on top. Reported is processor time of the calling thread, the least of several rounds, for a step of one unit:
``unbound_us`` by ``encode_triton`` and ``decode_triton``, ``bound_us`` by what a batch has bound, and that by launch,
which should be at most 10. Units of 16 Ki elements share launches with others where a compressor can do that; those of
4 Mi elements are launched by themselves. Writes ``bench/results/cpu/launch_cost.csv``.
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

BY_TABLE = ("Cast16", "EFSignSGD", "EFSignSGD(block=None)", "BlockQuant", "TernGrad")  # many units in a launch
ONE_BY_ONE = ("ChunkTopK", "RandomK", "TopK", "DGC")
SPECS = (*BY_TABLE, *ONE_BY_ONE)
SIZES = (2**14, 2**22)
LARGEST_US = 10.0
ROUNDS, CALLS = 7, 200


def least_us(step: Callable[[], None], rounds: int, calls: int) -> float:
    """Processor time of a call, in microseconds."""
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
    """``(call, a step through the launcher, the same through what is bound)``."""
    grad, out = torch.empty(numel), torch.empty(numel)
    residual = torch.empty(compressor.states * numel) if compressor.needs_feedback else None
    payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
    batch = compressor.batch("triton")
    encodes = batch.bind_encodes([Encoding(compressor, grad, residual, payload, 5, numel)], 1.0)
    decodes = batch.bind_decodes([Decoding(compressor, payload[None], out, numel)], 1.0, False)
    yield (
        "encode",
        lambda: compressor.encode_triton(grad, residual, payload, numel, 12, 1.0),
        lambda: encodes(7),
    )
    yield "decode", lambda: compressor.decode_triton(payload[None], out, numel, 1.0, False), decodes


def rows(specs: tuple[str, ...], rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    for spec in specs:
        for numel in SIZES:
            for call, unbound, bound in steps(gckernels.from_spec(spec), numel):
                with record_launches() as recorded:
                    bound()
                bound_us = least_us(bound, rounds, calls)
                yield {
                    "compressor": spec,
                    "call": call,
                    "elements": numel,
                    "launches": len(recorded),
                    "unbound_us": f"{least_us(unbound, rounds, calls):.1f}",
                    "bound_us": f"{bound_us:.1f}",
                    "bound_us_per_launch": f"{bound_us / len(recorded):.1f}",
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, help="compressors")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS, help="of each round")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    fake_driver.install()
    found = []
    for row in rows(tuple(arguments.specs), arguments.rounds, arguments.calls):
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
        found.append(row)
    slow = [row for row in found if float(row["bound_us_per_launch"]) > LARGEST_US]
    print(f"{len(found) - len(slow)} of {len(found)} take at most {LARGEST_US:.0f} us for a bound launch")
    if not arguments.dry:
        print("written:", write_csv("launch_cost", torch.device("cpu"), found))


if __name__ == "__main__":
    main()
