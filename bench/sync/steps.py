"""Whole training steps on links of a known rate: plain DDP, PyTorch's hooks, and compressors attached to DDP.

    python -m bench.sync.steps --models transformer_10m --rates 200mbit 1gbit none
    python -m bench.sync.steps --networks 4 --rates 100mbit --rounds 20 --resume
    python -m bench.sync.steps --networks 2x2 --local-rate 10gbit --rates 1gbit
    python -m bench.sync.steps --arms Cast16 "TopK(ratio=0.001)" "BlockQuant through alltoall"

Every model, network and rate is a cell with links of its own (``sync/lab``, needs root). Copies of one model
(``lib/models.py``) learn the same random answers with SGD and take turns within one process: plain DDP; plain DDP
again, which shows the noise floor; DDP with PyTorch's hooks; and DDP with each compressor at the default program
(``lib/arms.py``). A step is forward, backward and optimizer, and ends when the slowest rank has finished it. There are
as many rounds as fit into ``--budget-s``, at least five and at most ``--rounds``.

Rows of ``bench/results/cpu/steps.csv`` have the median time over the rounds, and median and quartiles of the ratios to
plain DDP in the same round. They have bytes per step as means over the ranks: payload without headers, and the count of
the kernel on the interface (with headers, acknowledgements and retransmissions). ``bound_s`` is the least time of the
step: forward, the larger of backward and the wire at the goodput of the link, optimizer, encoding of the first message
and decoding of the last, as medians over the ranks of a few traced steps. ``step_over_ddp_bound`` allows for the copies
into and out of DDP's buckets as well, with the backward of a hook that sends nothing.

PyTorch's PowerSGD hook hangs on Gloo with several buckets, so it has a single one, and overlaps nothing with backward.
A rank holds all copies: a model of 10 million parameters and all arms take 2.5 GB of memory per rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bench.lib import cells
from bench.lib.arms import AGAIN, COMPRESSORS, HOOKS, PLAIN, SILENT, THROUGH, WARM_UP, Arm, Setting, checked_arm
from bench.lib.bounds import Alone, Slice, encode_first_and_decode_last_s, link_nbytes, read_slices
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import throttle
from bench.lib.goodput import goodput
from bench.lib.rounds import ratio_columns, slowest, take_turns, turns_within
from gckernels.sync.lab import UNTHROTTLED, Network, sent_nbytes

KEY = ("model", "network", "rate", "arm")
PRINTED = (
    *("arm", "median_s", "ratio_to_plain", "ratio_quartile_1", "ratio_quartile_3", "sent_nbytes", "wire_over_sent"),
    *("wire_s", "bound_s", "step_over_bound", "step_over_ddp_bound"),
)
RATES = ("50mbit", "100mbit", "200mbit", "1gbit", "10gbit", UNTHROTTLED)
ROUNDS, ROUNDS_MIN, TRACED_ROUNDS = 20, 5, 3
BUDGET_S = 90
LEVELS = ("BlockQuant", "BlockQuant(bits=4)", "EFSignSGD", "ChunkTopK")  # through a program with levels, too


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, ["mlp"], RATES, BUDGET_S)
    parser.add_argument("--arms", nargs="+", type=checked_arm, metavar="ARM", help="arms beside plain DDP")
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
    traced = {spec: functools.partial(_traced, arm) for spec, arm in arms.items() if arm.compresses}
    traces = {spec: [*itertools.chain(*steps)] for spec, steps in take_turns(traced, TRACED_ROUNDS, 0).items()}
    rows: list[Row] = []
    for spec in cell.arms:
        arm, step_s = arms[spec], statistics.median(seconds[spec])
        sent, on_wire = arm.sent_nbytes(), wire[spec] - wire[""]
        row: Row = {"arm": spec, "rounds": len(seconds[spec]), "median_s": f"{step_s:.5f}"}
        row |= ratio_columns(seconds[spec], seconds[PLAIN], "ratio_to_plain")
        row |= {"sent_nbytes": f"{sent:.0f}", "wire_nbytes": f"{on_wire:.0f}"}
        row |= {"wire_over_sent": f"{on_wire / sent:.3f}", "residual_nbytes": arm.residual_nbytes()}
        slices, on_link = traces.get(spec, []), sent
        if slices and setting.topology.devices > 1:
            on_link = link_nbytes(slices[0], setting.topology) or sent
        alone = Alone(forward_s, backward_s, optimizer_s, ddp_backward_s, on_link / link_nbytes_per_s)
        row |= {"link_nbytes": f"{on_link:.0f}", "goodput_mbit_per_s": f"{link_nbytes_per_s * 8e-6:.1f}"}
        row |= {name: f"{value:.5f}" for name, value in dataclasses.asdict(alone).items()}
        rows.append(row | bound_columns(step_s, alone, slices))
    finite = all(arm.is_finite() for arm in arms.values())
    for arm in arms.values():
        arm.close()
    if not finite:
        raise SystemExit("the model has diverged: steps with NaN take another time than steps with numbers")
    return rows


def bound_columns(step_s: float, alone: Alone, traced: Sequence[Sequence[Slice]]) -> Row:
    """The bound of an arm's step.

    Args:
        step_s: seconds of a step that is not traced.
        alone: its parts, measured alone.
        traced: the slices of traced steps, of each rank.
    """
    ends = encode_first_and_decode_last_s(traced)
    bound_s, ddp_bound_s = alone.bound_s(*ends), alone.bound_s(*ends, with_ddp=True)
    found = {"bound_s": f"{bound_s:.5f}", "step_over_bound": f"{step_s / bound_s:.3f}"}
    found |= {"step_over_ddp_bound": f"{step_s / ddp_bound_s:.3f}"}
    return found | {"encode_first_s": f"{ends[0]:.5f}", "decode_last_s": f"{ends[1]:.5f}"}


def _traced(arm: Arm) -> list[list[Slice]]:
    """The slices of every rank in a traced step on rank 0, an empty list on the others; collective."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"  # rank 0 writes and reads it
        dist.barrier()
        arm.traced(path)
        return read_slices(path) if dist.get_rank() == 0 else []


def _mean_nbytes(rounds: Sequence[float]) -> float:
    """The median over the rounds of the mean over all ranks; collective."""
    nbytes = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(nbytes)
    return float(nbytes.median()) / dist.get_world_size()


def main() -> int:
    return cells.main(Measurement("steps", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
