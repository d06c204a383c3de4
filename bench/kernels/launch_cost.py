"""The host's time per launch: bound launches against launchers that are called in every step.

    python -m bench.kernels.launch_cost
    python -m bench.kernels.launch_cost TopK --dry

Triton uses a driver that launches nothing, so no GPU is needed. The measured time is that of Python up to the driver,
and of torch allocating or zeroing memory on the CPU; the driver's own time comes on top. The results are processor
times of the calling thread, the minimum over several rounds: ``unbound_us`` for ``encode`` and ``decode`` of the Triton
back end, unit by unit, ``bound_us`` for a bound batch of all units, and ``bound_us_per_launch``, which should be at
most 10. A step has one unit of 16 Ki elements, which shares launches with others if the compressor supports it, or one
of 4 Mi elements, which is launched separately, or all 161 units of ResNet-50, which should take at most a millisecond.
``PowerSGD`` works on the 54 matrices among them, and a step of it is a stage: both projections and the bases, or the
product of the factors. Writes ``bench/results/cpu/launch_cost.csv``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

import gckernels
from bench.lib import resnet50
from bench.lib.program import program_parser
from bench.lib.record import write_csv
from gckernels.codec import Decoding, Encoding
from gckernels.ops.powersgd import kernels as powersgd_kernels
from gckernels.testing.configurations import DEFAULTS
from gckernels.toolkit.kernels.launch import record_launches
from harness import fake_driver

SPECS = tuple(dict.fromkeys((*DEFAULTS, "EFSignSGD(block=None)", "PowerSGD")))
SETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "16 Ki": ((128, 128),),
    "4 Mi": ((2048, 2048),),
    "ResNet-50": tuple(resnet50.shapes()),
}
MAX_BOUND_US, MAX_BOUND_US_OF_MANY = 10.0, 1000.0
ROUNDS, CALLS = 7, 200

Calls = tuple[str, Callable[[], None], Callable[[], None]]
"""The name of a step, and the functions that take it: unbound and bound."""


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


def steps(compressor: gckernels.Codec, sizes: Sequence[int]) -> Iterator[Calls]:
    """Yield encode and decode of units of ``sizes`` elements."""
    encodings, decodings = [], []
    for numel in sizes:
        feedback = compressor.traits.needs_feedback
        residual = torch.empty(compressor.traits.states * numel) if feedback else None
        payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
        encodings.append(Encoding(compressor, torch.empty(numel), residual, payload, 5, numel))
        decodings.append(Decoding(compressor, payload[None], torch.empty(numel), numel))
    triton, added = compressor.triton, torch.zeros(1, dtype=torch.int64)
    encodes = triton.bind_encodes(encodings, 1.0, added)
    decodes = triton.bind_decodes(decodings, 1.0, False)
    yield "encode", lambda: _each(triton.encode, encodings), encodes
    yield "decode", lambda: _each(triton.decode, decodings), decodes


def powersgd_steps(shapes: Sequence[tuple[int, ...]], rank: int = 4) -> Iterator[Calls]:
    """Yield encode (both projections, the bases and what is kept) and decode of the matrices among ``shapes``."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    grads = [torch.empty(rows * cols) for rows, cols in matrices]
    residuals = [torch.empty_like(grad) for grad in grads]
    left = [torch.empty(rank, rows) for rows, _ in matrices]
    right = [torch.empty(rank, cols) for _, cols in matrices]
    kept = [torch.empty_like(factor) for factor in right]
    kernels = powersgd_kernels
    unbound = (
        lambda: kernels.left(grads, residuals, right, left, 0.5),
        lambda: kernels.orthogonalise(left, None),
        lambda: kernels.right(grads, residuals, left, right, 0.5),
        lambda: kernels.keep(right, kept),
    )
    bound = (
        kernels.bind_left(grads, residuals, right, left, 0.5),
        kernels.bind_orthogonalise(left, None),
        kernels.bind_right(grads, residuals, left, right, 0.5),
        kernels.bind_keep(right, kept),
    )
    decode = kernels.bind_reconstruct(left, right, grads, residuals)
    yield "encode", lambda: _each(_called, unbound), lambda: _each(_called, bound)
    yield "decode", lambda: kernels.reconstruct(left, right, grads, residuals), decode


def _each(function: Callable[[Any], Any], arguments: Iterable[Any]) -> None:
    for argument in arguments:
        function(argument)


def _called(function: Callable[[], None]) -> None:
    function()


def rows(specs: Sequence[str], rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    """Yield a row of results for every compressor, set of units, and call."""
    for spec in specs:
        compressor = gckernels.from_spec(spec)
        for name, shapes in SETS.items():
            if isinstance(compressor, gckernels.Codec):
                steps_of_set = steps(compressor, [math.prod(shape) for shape in shapes])
            else:
                steps_of_set = powersgd_steps(shapes)
            for call, unbound, bound in steps_of_set:
                with record_launches() as recorded:
                    bound()
                bound_us = min_us(bound, rounds, calls)
                yield {
                    "compressor": spec,
                    "call": call,
                    "units": name,
                    "launches": len(recorded),
                    "unbound_us": f"{min_us(unbound, rounds, max(1, calls // len(shapes))):.1f}",
                    "bound_us": f"{bound_us:.1f}",
                    "bound_us_per_launch": f"{bound_us / len(recorded):.1f}",
                }


def main() -> None:
    parser = program_parser(__doc__)
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
    many = [float(row["bound_us"]) for row in table if row["units"] == "ResNet-50"]
    quick = sum(each <= MAX_BOUND_US_OF_MANY for each in many)
    print(f"{quick} of {len(many)} take at most {MAX_BOUND_US_OF_MANY:.0f} us for the units of ResNet-50")
    if not arguments.dry:
        print("written:", write_csv("launch_cost", torch.device("cpu"), table))


if __name__ == "__main__":
    main()
