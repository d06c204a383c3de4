"""Random quantisers on the host by the instructions that their programs may use, and the random numbers alone.

    python -m bench.kernels.vector_widths     # writes bench/results/cpu/vector_widths.csv; a minute, on a quiet machine

Programs are compiled for this processor, once with all of its vector instructions and once without AVX-512. Each choice
has a process per round, in turns; the first choice has a second process, which shows the noise floor. Results are
medians over the rounds. ``draws alone`` draws the 16 bits of every element and writes nothing to memory, with one
thread. ``percent_of_copy`` is the rate of the least bytes that must move, relative to a copy by as many threads; for
``draws alone`` it is the rate that ``QSGD`` could not exceed if it only drew its numbers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.lib.cases import FUSED, YARDSTICK_NUMEL, Case, yardstick
from bench.lib.program import printed_by_workers, program_parser
from bench.lib.record import write_csv
from bench.lib.rounds import CPU, SETTLE_S, markdown, seconds
from gckernels.toolkit.host import library
from gckernels.toolkit.quantizer.host import program

VECTORS = {"all": "gcc", "without AVX-512": "gcc -mno-avx512f"}
"""The values of ``$CC``, by what they are called in the table."""
SPECS = (
    "QSGD",
    "TernGrad",
    "TernGrad(block=None)",
    "LinearQuant(stochastic=True)",
    "LinearQuant(stochastic=True, block=128)",
    "Natural",
)
NUMEL = 2**25
ROUNDS, REPEATS = 5, 9
DRAWS_ALONE = "draws alone"

DRAWS = """
void draws_alone(int64_t count) {
    float dither[TILE];
    for (int64_t first = 0; first < count; first += TILE) {
        draw(1, first, TILE, dither, dither);
        __asm__ volatile("" : : "r"(dither) : "memory"); /* so that the numbers are not left out */
    }
}
"""


def measure() -> dict[str, dict[str, float]]:
    """Seconds per element and the percentage of the copy, by spec and number of threads, in this process."""
    copy, found = yardstick(CPU), {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for spec in SPECS:
            case = Case(spec, "encode", 1, FUSED, NUMEL)
            case_s, copy_s = _medians(case.prepare(CPU), copy)
            found[f"{spec}, {threads}"] = _result(case_s, copy_s, case.moved_nbytes)
    qsgd = Case("QSGD", "encode", 1, FUSED, NUMEL)
    built: Any = library.library(program(qsgd.compressor, merging=False) + DRAWS)
    built.draws_alone.argtypes, built.draws_alone.restype = (ctypes.c_int64,), None
    torch.set_num_threads(1)
    draws_s, copy_s = _medians(lambda: built.draws_alone(NUMEL), copy)
    return found | {f"{DRAWS_ALONE}, 1": _result(draws_s, copy_s, qsgd.moved_nbytes)}


def _medians(call: Callable[[], Any], copy: Callable[[], Any]) -> tuple[float, float]:
    """The median times of the call and of the copy, in turns."""
    call()
    calls_s, copies_s = [], []
    for _ in range(REPEATS):
        copies_s.append(seconds(copy))
        time.sleep(SETTLE_S)  # the copy's threads spin for milliseconds, on the cores of the call
        call()  # wakes the threads
        calls_s.append(seconds(call))
    return statistics.median(calls_s), statistics.median(copies_s)


def _result(call_s: float, copy_s: float, moved_nbytes: int) -> dict[str, float]:
    case_rate, copy_rate = moved_nbytes / call_s, 8 * YARDSTICK_NUMEL / copy_s
    return {"s_per_element": call_s / NUMEL, "percent": 100 * case_rate / copy_rate}


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().worker:
        print(json.dumps(measure()))
        return
    first, *others = VECTORS
    arms = {first: VECTORS[first], f"{first}, again": VECTORS[first], **{name: VECTORS[name] for name in others}}
    printed = printed_by_workers("bench.kernels.vector_widths", list(arms.values()), ROUNDS)
    rounds = dict(zip(arms, printed, strict=True))
    rows = []
    for call in rounds[first][0]:
        work, threads = call.rsplit(", ", 1)
        for name, found in rounds.items():
            middle = {key: statistics.median(each[call][key] for each in found) for key in found[0][call]}
            row = {"work": work, "threads": threads, "instructions": name}
            row |= {"ns_per_element": f"{1e9 * middle['s_per_element']:.3f}"}
            rows.append(row | {"percent_of_copy": f"{middle['percent']:.0f}"})
    print(markdown(rows, list(rows[0])))
    print("wrote", write_csv("vector_widths", CPU, rows))


if __name__ == "__main__":
    main()
