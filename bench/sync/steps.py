"""Whole training steps on links of a known rate: plain DDP, PyTorch's hooks, and compressors attached to DDP.

    python -m bench.sync.steps --models transformer_10m --rates 200mbit 1gbit none
    python -m bench.sync.steps --networks 4 --rates 100mbit --rounds 20 --resume
    python -m bench.sync.steps --arms Cast16 "TopK(ratio=0.001)" --where

Every model, number of ranks and rate is a cell with a separate network of ranks (``sync/lab``, needs root). Copies
of one model (``lib/models.py``) learn the same random answers with SGD and take turns within one process: plain DDP;
plain DDP again, which shows the noise floor; DDP with PyTorch's hooks; and DDP with each compressor at the default
program (``lib/arms.py``). A step is forward, backward and optimizer, and ends when the slowest rank has finished it.

Rows of ``bench/results/cpu/steps.csv`` have the median time over the rounds, and median and quartiles of the ratios to
plain DDP in the same round. They have bytes per step as means over the ranks: payload without headers, and what the
kernel counts on the interface (with headers, acknowledgements and retransmissions). ``bound_s`` is the least time of
the step: forward, the larger of backward and the wire at the goodput of the link, optimizer, encoding of the first
message and decoding of the last. Columns that begin with ``rest`` say where traced steps spend the rest, and sum up to
``rest_s`` (``lib/bounds.py``); ``--where`` prints them. Two columns show how much the work on a rank's core slows other
work down. ``backward_over_alone`` is the time until the last gradients are ready, over that of a backward alone.
``codec_over_alone`` is the time of the codecs, over that in a step whose gradients are given at once.

PyTorch's PowerSGD hook hangs on Gloo with several buckets, so it has a single one, and overlaps nothing with backward.
A rank holds all copies: a model of 10 million parameters and 13 arms take 3 GB of memory per rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bench.lib import cells
from bench.lib.arms import AGAIN, COMPRESSORS, HOOKS, PLAIN, WARM_UP, Arm
from bench.lib.bounds import Alone, Rest, codec_s, read_steps, rest_of
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.goodput import goodput
from bench.lib.models import WORKLOADS
from bench.lib.rounds import markdown, ratio_columns, take_turns
from bench.lib.sizes import two_or_more
from gckernels.sync.lab import UNTHROTTLED, checked_rate, sent_nbytes

KEY = ("model", "network", "rate", "arm")
PRINTED = ("arm", "median_s", "ratio_to_plain", "ratio_quartile_1", "ratio_quartile_3", "sent_nbytes", "wire_over_sent")
PRINTED += ("wire_s", "bound_s", "step_over_bound")
REST = tuple(field.name for field in dataclasses.fields(Rest))
CONTENTION = ("backward_over_alone", "codec_over_alone")
WHERE = ("arm", "bound_s", "step_over_bound", *REST, *CONTENTION)
ROUNDS, TRACED_ROUNDS = 20, 3


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    rates = ["100mbit", "1gbit", UNTHROTTLED]
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["mlp"])
    parser.add_argument("--networks", nargs="+", type=two_or_more, default=[2], metavar="RANKS")
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=rates, help='"none" does not throttle')
    arms = [AGAIN, *HOOKS, *COMPRESSORS]
    parser.add_argument("--arms", nargs="+", default=arms, metavar="ARM", help="arms beside plain DDP")
    parser.add_argument("--where", action="store_true", help="print where the time beyond the bound goes")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, number of ranks and rate."""
    arms = tuple(dict.fromkeys((PLAIN, *args.arms)))
    settings = itertools.product(args.models, args.networks, args.rates)
    return [
        Cell(ranks, rate, {"model": model, "network": ranks, "rate": rate, "rounds": args.rounds}, arms)
        for model, ranks, rate in settings
    ]


def empty_step() -> tuple[float, float]:
    """The seconds (0) and the sent bytes of a step that only runs the barrier."""
    before = sent_nbytes()
    dist.barrier()
    return 0.0, float(sent_nbytes() - before)


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows on rank 0, an empty list on the others."""
    workload = WORKLOADS[str(cell.columns["model"])]
    batch = workload.batch(torch.Generator().manual_seed(dist.get_rank()))
    arms = {spec: Arm(spec, workload, batch) for spec in dict.fromkeys((PLAIN, *cell.arms))}
    link_nbytes_per_s = goodput()
    steps = {spec: arm.step for spec, arm in arms.items()}
    results = take_turns({"": empty_step} | steps | {"alone": arms[PLAIN].alone}, args.rounds, WARM_UP)
    forward_s, backward_s, optimizer_s = _slowest(results.pop("alone")).median(dim=0).values.tolist()
    seconds = {spec: _slowest(each)[:, 0].tolist() for spec, each in results.items()}
    wire = {spec: _mean_nbytes([nbytes for _, nbytes in each]) for spec, each in results.items()}
    rows = []
    for spec, arm in arms.items():
        if spec not in cell.arms:
            continue
        sent, on_wire = arm.sent_nbytes(), wire[spec] - wire[""]
        alone = Alone(forward_s, backward_s, optimizer_s, sent / link_nbytes_per_s)
        step_s = statistics.median(seconds[spec])
        row: Row = {"arm": spec, "median_s": f"{step_s:.5f}"}
        row |= ratio_columns(seconds[spec], seconds[PLAIN], "ratio_to_plain")
        row |= {"sent_nbytes": f"{sent:.0f}", "wire_nbytes": f"{on_wire:.0f}"}
        row |= {"wire_over_sent": f"{on_wire / sent:.3f}", "residual_nbytes": arm.residual_nbytes()}
        row["goodput_mbit_per_s"] = f"{link_nbytes_per_s * 8e-6:.1f}"
        row |= {field: f"{value:.5f}" for field, value in dataclasses.asdict(alone).items()}
        row |= _bound_columns(step_s, alone, arm)
        rows.append(row)
    finite = all(arm.is_finite() for arm in arms.values())
    for arm in arms.values():
        arm.close()
    if not finite:
        raise SystemExit("the model has diverged: steps with NaN take another time than steps with numbers")
    if args.where and dist.get_rank() == 0:
        print(f"\n{cell}: seconds beyond the bound\n\n{markdown(rows, WHERE)}")
    return rows if dist.get_rank() == 0 else []


def _bound_columns(step_s: float, alone: Alone, arm: Arm) -> Row:
    """The bound of an arm's step, and where its traced steps spend the rest; collective."""
    columns: Row = dict.fromkeys((*REST, *CONTENTION), "")
    first_and_last = (0.0, 0.0)
    if arm.attachment is not None:
        found = [_traced(arm, alone) for _ in range(TRACED_ROUNDS)]
        rests = [rest for rest, _ in found if rest is not None]
        if rests:
            columns |= {field: f"{statistics.median(getattr(rest, field) for rest in rests):.5f}" for field in REST}
            first_and_last = (float(columns["encode_first_s"]), float(columns["decode_last_s"]))
            columns["backward_over_alone"] = f"{float(columns['last_submitted_s']) / alone.backward_s:.2f}"
            codec_alone_s = statistics.median(seconds for _, seconds in found)
            if codec_alone_s:
                columns["codec_over_alone"] = f"{float(columns['codec_s']) / codec_alone_s:.2f}"
    bound_s = alone.bound_s(*first_and_last)
    return {"bound_s": f"{bound_s:.5f}", "step_over_bound": f"{step_s / bound_s:.3f}"} | columns


def _traced(arm: Arm, alone: Alone) -> tuple[Rest | None, float]:
    """Where a traced step spends its time, and the codecs' seconds on that rank without backward; collective.

    Both are of use on rank 0 only.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"  # rank 0 writes and reads it
        for without_backward in (False, True):
            dist.barrier()
            ticks = torch.tensor(arm.traced(path, without_backward))
            everyone = [torch.empty_like(ticks) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, ticks)
            if dist.get_rank() == 0:
                found.append(read_steps(path, [each.tolist() for each in everyone]))
    if not found:
        return None, 0.0
    return rest_of(found[0], alone), max(codec_s(step.slices) for step in found[1])


def _slowest(rounds: Sequence[tuple[float, ...]]) -> torch.Tensor:
    """The largest values over all ranks, ``[rounds, values]``; collective."""
    values = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def _mean_nbytes(rounds: Sequence[float]) -> float:
    """The median over the rounds of the mean over all ranks; collective."""
    nbytes = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(nbytes)
    return float(nbytes.median()) / dist.get_world_size()


def main() -> int:
    return cells.main(Measurement("steps", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
