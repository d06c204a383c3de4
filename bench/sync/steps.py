"""Whole training steps on links of a known rate: plain DDP, PyTorch's hooks, and compressors attached to DDP.

    python -m bench.sync.steps --models transformer_10m --rates 200mbit 1gbit none
    python -m bench.sync.steps --networks 4 --rates 100mbit --rounds 20 --resume
    python -m bench.sync.steps --networks 2x2 --local-rate 10gbit --rates 1gbit
    python -m bench.sync.steps --arms Cast16 "TopK(ratio=0.001)" "BlockQuant through alltoall" --where

Every model, network and rate is a cell with links of its own (``sync/lab``, needs root). Copies of one model
(``lib/models.py``) learn the same random answers with SGD and take turns within one process: plain DDP; plain DDP
again, which shows the noise floor; DDP with PyTorch's hooks; and DDP with each compressor at the default program
(``lib/arms.py``). A step is forward, backward and optimizer, and ends when the slowest rank has finished it. There are
as many rounds as fit into ``--budget-s``, at least five and at most ``--rounds``.

Rows of ``bench/results/cpu/steps.csv`` have the median time over the rounds, and median and quartiles of the ratios to
plain DDP in the same round. They have bytes per step as means over the ranks: payload without headers, and the count of
the kernel on the interface (with headers, acknowledgements and retransmissions). ``bound_s`` is the least time of the
step: forward, the larger of backward and the wire at the goodput of the link, optimizer, encoding of the first message
and decoding of the last. ``step_over_ddp_bound`` allows for the copies into and out of DDP's buckets as well, with the
backward of a hook that sends nothing. Columns that begin with ``rest`` say where a traced step spends the rest, and sum
up to ``rest_s`` (``lib/bounds.py``); ``--where`` prints them. Two columns show how much the work on a rank's core slows
other work down. ``backward_over_alone`` is the time until the last gradients are ready, over that of a backward alone.
``codec_over_alone`` is the time of the codecs, over that in a step whose gradients are given at once.

PyTorch's PowerSGD hook hangs on Gloo with several buckets, so it has a single one, and overlaps nothing with backward.
A rank holds all copies: a model of 10 million parameters and all arms take 2.5 GB of memory per rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.lib import cells
from bench.lib.arms import AGAIN, COMPRESSORS, HOOKS, PLAIN, SILENT, THROUGH, WARM_UP, Arm, Setting, checked_arm
from bench.lib.bounds import Alone, Rest, Step, codec_s, link_nbytes, read_steps, rest_of
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import throttle
from bench.lib.goodput import goodput
from bench.lib.rounds import markdown, ratio_columns, slowest, take_turns, turns_within
from gckernels.sync.lab import UNTHROTTLED, Network, sent_nbytes

KEY = ("model", "network", "rate", "arm")
PRINTED = (
    *("arm", "median_s", "ratio_to_plain", "ratio_quartile_1", "ratio_quartile_3", "sent_nbytes", "wire_over_sent"),
    *("wire_s", "bound_s", "step_over_bound", "step_over_ddp_bound"),
)
REST = tuple(field.name for field in dataclasses.fields(Rest))
CONTENTION = ("backward_over_alone", "codec_over_alone")
WHERE = ("arm", "bound_s", "step_over_bound", "step_over_ddp_bound", *REST, *CONTENTION)
RATES = ("50mbit", "100mbit", "200mbit", "1gbit", "10gbit", UNTHROTTLED)
ROUNDS, ROUNDS_MIN, TRACED_ROUNDS = 20, 5, 3
BUDGET_S = 90
LEVELS = ("BlockQuant", "BlockQuant(bits=4)", "EFSignSGD", "ChunkTopK")  # through a program with levels, too


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, ["mlp"], RATES, BUDGET_S)
    parser.add_argument("--arms", nargs="+", type=checked_arm, metavar="ARM", help="arms beside plain DDP")
    parser.add_argument("--where", action="store_true", help="print where the time beyond the bound goes")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""

    def arms(network: Network) -> list[str]:
        levels = [f"{spec}{THROUGH}hierarchical" for spec in LEVELS] if network.ranks_per_machine > 1 else []
        return [PLAIN, *(args.arms or [AGAIN, *HOOKS, *COMPRESSORS, *levels])]

    return cells.grid(args, arms)


def empty_step() -> tuple[float, float]:
    """The seconds (0) and the sent bytes of a step that only runs the barrier."""
    before = sent_nbytes()
    dist.barrier()
    return 0.0, float(sent_nbytes() - before)


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows."""
    setting, link_nbytes_per_s = Setting.of(str(cell.columns["model"]), cell.network), goodput()
    throttle(cell.network, UNTHROTTLED)  # the first steps send everything, which would take minutes
    arms = {spec: Arm(spec, setting) for spec in dict.fromkeys((PLAIN, *cell.arms))}
    silent = Arm(SILENT, setting)
    steps = {spec: arm.step for spec, arm in arms.items()}
    take_turns(steps | {SILENT: silent.step}, 0, WARM_UP)
    throttle(cell.network, cell.network.rate)
    turns = {"": empty_step} | steps | {"alone": arms[PLAIN].alone, SILENT: lambda: (silent.backward_s(),)}
    results = turns_within(turns, args.budget_s, ROUNDS_MIN, args.rounds)
    forward_s, backward_s, optimizer_s = slowest(results.pop("alone")).median(dim=0).values.tolist()
    (ddp_backward_s,) = slowest(results.pop(SILENT)).median(dim=0).values.tolist()
    seconds = {spec: slowest(each)[:, 0].tolist() for spec, each in results.items()}
    wire = {spec: _mean_nbytes([nbytes for _, nbytes in each]) for spec, each in results.items()}
    compressed = {spec: arm for spec, arm in arms.items() if arm.compresses}
    traces = take_turns({spec: functools.partial(_traced, arm) for spec, arm in compressed.items()}, TRACED_ROUNDS, 0)
    codecs_alone_s = {spec: _codec_alone_s(arm) for spec, arm in compressed.items()}
    rows: list[Row] = []
    for spec in cell.arms:
        arm, step_s = arms[spec], statistics.median(seconds[spec])
        sent, on_wire = arm.sent_nbytes(), wire[spec] - wire[""]
        row: Row = {"arm": spec, "rounds": len(seconds[spec]), "median_s": f"{step_s:.5f}"}
        row |= ratio_columns(seconds[spec], seconds[PLAIN], "ratio_to_plain")
        row |= {"sent_nbytes": f"{sent:.0f}", "wire_nbytes": f"{on_wire:.0f}"}
        row |= {"wire_over_sent": f"{on_wire / sent:.3f}", "residual_nbytes": arm.residual_nbytes()}
        traced, on_link = traces.get(spec, []), sent
        if traced and setting.topology.devices > 1 and dist.get_rank() == 0:
            on_link = link_nbytes(traced[0][0].slices, setting.topology) or sent
        alone = Alone(forward_s, backward_s, optimizer_s, ddp_backward_s, on_link / link_nbytes_per_s)
        row |= {"link_nbytes": f"{on_link:.0f}", "goodput_mbit_per_s": f"{link_nbytes_per_s * 8e-6:.1f}"}
        row |= {name: f"{value:.5f}" for name, value in dataclasses.asdict(alone).items()}
        rows.append(row | bound_columns(step_s, alone, traced, codecs_alone_s.get(spec, 0.0)))
    finite = all(arm.is_finite() for arm in arms.values())
    for arm in arms.values():
        arm.close()
    if not finite:
        raise SystemExit("the model has diverged: steps with NaN take another time than steps with numbers")
    if args.where and dist.get_rank() == 0:
        print(f"\n{cell}: seconds beyond the bound\n\n{markdown(rows, WHERE)}")
    return rows


def bound_columns(step_s: float, alone: Alone, traced: Sequence[Sequence[Step]], codec_alone_s: float) -> Row:
    """The bound of an arm's step, and where that traced step spends the rest which takes closest to ``step_s``.

    Args:
        step_s: seconds of a step that is not traced.
        alone: its parts, measured alone.
        traced: traced steps, by rank.
        codec_alone_s: seconds of the codecs in a step without backward.
    """
    columns: Row = dict.fromkeys((*REST, *CONTENTION), "")
    first_and_last = (0.0, 0.0)
    rests = [rest for rest in (rest_of(step, alone) for step in traced if step) if rest is not None]
    if rests:
        typical = min(rests, key=lambda rest: abs(rest.traced_s - step_s))
        columns |= {field: f"{value:.5f}" for field, value in dataclasses.asdict(typical).items()}
        first_and_last = (float(columns["encode_first_s"]), float(columns["decode_last_s"]))
        columns["backward_over_alone"] = f"{float(columns['last_submitted_s']) / alone.backward_s:.2f}"
        if codec_alone_s:
            columns["codec_over_alone"] = f"{float(columns['codec_s']) / codec_alone_s:.2f}"
    bound_s = alone.bound_s(*first_and_last)
    found = {"bound_s": f"{bound_s:.5f}", "step_over_bound": f"{step_s / bound_s:.3f}"}
    found["step_over_ddp_bound"] = f"{step_s / alone.bound_s(*first_and_last, with_ddp=True):.3f}"
    return found | columns


def _traced(arm: Arm, without_backward: bool = False) -> list[Step]:
    """A traced step of every rank on rank 0, an empty list on the others; collective."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"  # rank 0 writes and reads it
        dist.barrier()
        ticks = torch.tensor(arm.traced(path, without_backward))
        everyone = [torch.empty_like(ticks) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, ticks)
        found: list[Any] = [each.tolist() for each in everyone]
        return read_steps(path, found) if dist.get_rank() == 0 else []


def _codec_alone_s(arm: Arm) -> float:
    """Seconds of the codecs in a step without backward, on the slowest rank; 0 on ranks other than 0; collective."""
    return max((codec_s(step.slices) for step in _traced(arm, without_backward=True)), default=0.0)


def _mean_nbytes(rounds: Sequence[float]) -> float:
    """The median over the rounds of the mean over all ranks; collective."""
    nbytes = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(nbytes)
    return float(nbytes.median()) / dist.get_world_size()


def main() -> int:
    return cells.main(Measurement("steps", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
