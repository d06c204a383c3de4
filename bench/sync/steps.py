"""Whole training steps on links of a known rate: plain DDP, and DDP with compressors attached.

    python -m bench.sync.steps
    python -m bench.sync.steps --world-size 4 --rates 100mbit --rounds 20

Every rate gets a separate network of ranks (``sync/lab``, needs root). Copies of one model (7.3 million parameters)
learn the same random answers with SGD and take turns within one process: plain DDP; plain DDP again, which shows the
noise floor; and DDP with each compressor at the default program. A step is forward, backward and optimizer, and ends
when the slowest rank has finished it. Rows of ``bench/results/cpu/steps_links.csv`` have the median time over the
rounds, and median and quartiles of the ratios to plain DDP in the same round. They also have bytes per step as means
over the ranks: the bytes according to the plan, the bytes that the kernel counts on the interface (with headers,
acknowledgements and retransmissions), and their ratio.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib.record import merge_csv
from bench.lib.rounds import WIDTH, markdown, network, ratio_columns, take_turns
from bench.lib.sizes import two_or_more
from gckernels import sync
from gckernels.sync.lab import RATE, UNTHROTTLED, checked_rate, in_rank, run_in_links, sent_nbytes

NAME = "steps_links"
KEY = ("rate", "world_size", "arm")
PRINTED_COLUMNS = ("rate", "arm", "median_s", "ratio_to_plain", "ratio_quartile_1", "ratio_quartile_3")
PRINTED_COLUMNS += ("sent_nbytes", "wire_nbytes", "wire_over_sent")
PLAIN, AGAIN = "plain", "plain again"
COMPRESSORS = ("Cast16", "BlockQuant", "EFSignSGD", "TopK(ratio=0.01)", "PowerSGD(rank=4)", "ChunkTopK")
ROUNDS, WARM_UP = 40, 3  # DDP rebuilds its buckets after the first step, which is not compressed
BATCH, BUCKET_CAP_MB = 32, 4
CPU = torch.device("cpu")


def parse_args() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    rates = ["100mbit", "1gbit", UNTHROTTLED]
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=rates, help='"none" does not throttle')
    parser.add_argument("--world-size", type=two_or_more, default=2)
    parser.add_argument("--compressors", nargs="+", default=list(COMPRESSORS), metavar="SPEC")
    parser.add_argument("--rounds", type=two_or_more, default=ROUNDS)
    return parser.parse_args()


# -------------------------------------------------------------------- in each rank


class Arm:
    """A model, its synchronisation and its optimizer, on a separate process group.

    Args:
        spec: a compressor as :func:`gckernels.from_spec` takes it, or one of the plain arms.
    """

    def __init__(self, spec: str) -> None:
        self.model = DistributedDataParallel(network(CPU), process_group=dist.new_group(), bucket_cap_mb=BUCKET_CAP_MB)
        plain = spec in (PLAIN, AGAIN)
        self.attachment = None if plain else sync.attach(self.model, gckernels.from_spec(spec))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, batch: torch.Tensor, answers: torch.Tensor) -> tuple[float, float]:
        """Train one step; returns its seconds, and the bytes that the interface has sent meanwhile."""
        before, start = sent_nbytes(), time.perf_counter()
        mse_loss(self.model(batch), answers).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        elapsed = time.perf_counter() - start
        dist.barrier()  # all bytes of the step have arrived
        return elapsed, float(sent_nbytes() - before)

    def sent_nbytes(self) -> float:
        """Bytes that a rank sends in a step according to the plan, as a mean over all ranks."""
        if self.attachment is not None:
            return self.attachment.sent_nbytes_per_step()
        return sync.allreduce_sent_nbytes(sum(each.nbytes for each in self.model.parameters()), dist.get_world_size())


def empty_step() -> tuple[float, float]:
    """The seconds (0) and the sent bytes of a step that only runs the barrier."""
    before = sent_nbytes()
    dist.barrier()
    return 0.0, float(sent_nbytes() - before)


def run_rank(args: argparse.Namespace) -> None:
    rate, world_size = os.environ[RATE], args.world_size
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch, answers = torch.randn(2, BATCH, WIDTH, generator=generator)
    arms = {spec: Arm(spec) for spec in (PLAIN, AGAIN, *args.compressors)}
    steps = {spec: functools.partial(arm.step, batch, answers) for spec, arm in arms.items()}
    results = take_turns({"": empty_step} | steps, args.rounds, WARM_UP)
    if not all(bool(each.isfinite().all()) for arm in arms.values() for each in arm.model.parameters()):
        raise SystemExit("the model has diverged: steps with NaN take another time than steps with numbers")
    measured = torch.tensor(list(results.values()), dtype=torch.float64)  # [arms, rounds, 2]
    slowest, nbytes = measured[..., 0].clone(), measured[..., 1].clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(nbytes)
    seconds = dict(zip(results, slowest.tolist(), strict=True))
    wire = dict(zip(results, (nbytes.median(dim=1).values / world_size).tolist(), strict=True))
    rows: list[dict[str, Any]] = []
    for spec, arm in arms.items():
        sent, on_wire = arm.sent_nbytes(), wire[spec] - wire[""]
        row: dict[str, Any] = {"rate": rate, "world_size": world_size, "arm": spec, "rounds": args.rounds}
        row |= {"median_s": f"{statistics.median(seconds[spec]):.5f}"}
        row |= ratio_columns(seconds[spec], seconds[PLAIN], "ratio_to_plain")
        row |= {"sent_nbytes": f"{sent:.0f}", "wire_nbytes": f"{on_wire:.0f}"}
        row["wire_over_sent"] = f"{on_wire / sent:.3f}"
        row["residual_nbytes"] = 0 if arm.attachment is None else arm.attachment.residual_nbytes()
        rows.append(row)
    if dist.get_rank() == 0:
        merge_csv(NAME, CPU, rows, KEY)
        print(f"\n{world_size} ranks, {rate}\n\n{markdown(rows, PRINTED_COLUMNS)}", flush=True)
    for arm in arms.values():
        if arm.attachment is not None:
            arm.attachment.close()
    dist.destroy_process_group()


def main() -> int:
    args = parse_args()
    if in_rank():
        run_rank(args)
        return 0
    return run_in_links(args.world_size, args.rates, ["-m", "bench.sync.steps", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
