"""The host path built by different C compilers: processor time relative to the first compiler.

    python -m bench.kernels.compilers --compilers gcc clang "python -m ziglang cc"

Every compiler gets a process per round, in turns. The first compiler gets a second process, which shows the noise
floor. A process encodes with feedback, and decodes, with one thread, and reports its best time of each call; the
results are medians over the rounds. Writes ``bench/results/cpu/compilers.csv``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time

import torch

import gckernels
from bench.lib.program import printed_by_workers, program_parser
from bench.lib.record import write_csv
from bench.lib.rounds import CPU, markdown

COMPRESSORS = ("BlockFP8", "BlockQuant", "Cast16", "ChunkTopK", "EFSignSGD", "OneBit", "QSGD", "TBQ", "TopK")
NUMEL = 2**22
REPEATS, ROUNDS = 7, 3


def measure() -> dict[str, float]:
    """Best processor time of each call in seconds, by name, with the compiler of this process."""
    torch.set_num_threads(1)
    grad, best_s = torch.randn(NUMEL), {}
    for name in COMPRESSORS:
        compressor = gckernels.from_spec(name)
        assert isinstance(compressor, gckernels.Codec)
        residual = torch.zeros(compressor.traits.states * NUMEL)
        payload = torch.empty(compressor.payload_nbytes(NUMEL), dtype=torch.uint8)
        out = torch.empty(NUMEL)
        feedback = residual if compressor.traits.needs_feedback else None
        calls = {
            "encode": functools.partial(compressor.encode, grad, feedback, payload, 1),
            "decode": functools.partial(compressor.decode, payload[None], out),
        }
        for call, work in calls.items():
            times = []
            for _ in range(REPEATS):
                started = time.process_time()
                work()
                times.append(time.process_time() - started)
            best_s[f"{name} {call}"] = min(times)
    return best_s


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--compilers", nargs="+", default=["gcc", "clang"], metavar="CC", help="commands, as in CC")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure()))
        return
    arms = [options.compilers[0], *options.compilers]
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = printed_by_workers("bench.kernels.compilers", arms, ROUNDS)
    rows = []
    for call in rounds[0][0]:
        seconds = [statistics.median(each[call] for each in arm) for arm in rounds]
        for arm, command in enumerate(arms[1:], 1):
            again = " again" if arm == 1 else ""
            ratio = f"{seconds[arm] / seconds[0]:.2f}"
            rows.append({"call": call, "compiler": command + again, "seconds": f"{seconds[arm]:.4g}", "ratio": ratio})
    print(markdown(rows, list(rows[0])))
    for command in dict.fromkeys(row["compiler"] for row in rows):
        ratios = [float(row["ratio"]) for row in rows if row["compiler"] == command]
        print(f"{command}: {min(ratios)} to {max(ratios)}, median {statistics.median(ratios):.2f}")
    print("wrote", write_csv("compilers", CPU, rows))


if __name__ == "__main__":
    main()
