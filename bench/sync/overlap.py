"""The share of computing that is hidden behind communication when a large parameter is synchronised in parts.

    python -m bench.sync.overlap
    python -m bench.sync.overlap --rate 100mbit --world-size 4 --compressors EFSignSGD --programs alltoall

A bare module with a large parameter and some small ones is synchronised on links of a known rate (``sync/lab``, needs
root). The large parameter is one unit or is cut into two or four parts, and the plan has one, two or four channels. All
these arms, and the first one again to show the noise floor, take turns within one process. Every step is recorded by
``gckernels.sync.record_timeline``, and ``lib/spans.py`` computes busy times from the trace. Rows of
``bench/results/cpu/overlap.csv`` have medians over the rounds: busy times are means over the ranks, the span is that of
the slowest rank, and its ratio to the first arm comes with quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import gckernels
from bench.lib import cells
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.rounds import ratio_columns, take_turns
from bench.lib.sizes import parse_numel, two_or_more
from bench.lib.spans import Busy, busy, read_trace
from gckernels import sync
from gckernels.sync.frontends.budget import plan_nbytes
from gckernels.sync.lab import Network, checked_rate

KEY = ("rate", "world_size", "compressor", "program", "numel", "arm")
PRINTED = (
    *("arm", "span_s", "ratio_to_first", "ratio_quartile_1", "ratio_quartile_3"),
    *("compute_s", "communicate_s", "either_s", "hidden_share"),
)
ROUNDS, WARM_UP = 24, 3  # the first step is not compressed
PARTS, CHANNELS = (1, 2, 4), (1, 2, 4)
SMALL, SMALL_SHAPE = 4, (256, 1024)


def programs(world_size: int) -> dict[str, sync.programs.Program]:
    return {
        "alltoall": sync.programs.ALLTOALL,
        "allgather": sync.programs.ALLGATHER,
        "ring": sync.programs.ring(world_size),
    }


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    parser.add_argument("--rate", type=checked_rate, default="1gbit", help='of each link; "none" does not throttle')
    parser.add_argument("--world-size", type=two_or_more, default=2)
    parser.add_argument(
        "--numel", type=parse_numel, default=2**24, help="elements of the large parameter, such as 16Mi"
    )
    parser.add_argument("--compressors", nargs="+", default=["BlockQuant", "EFSignSGD"], metavar="SPEC")
    parser.add_argument("--programs", nargs="+", default=list(programs(2)), choices=list(programs(2)))
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each compressor and program."""
    where = {"rate": args.rate, "world_size": args.world_size}
    how = {"numel": args.numel, "rounds": args.rounds}
    network, arms = Network(args.world_size, args.rate), tuple(arm_names())
    return [
        Cell(network, where | {"compressor": spec, "program": name} | how, arms)
        for spec, name in itertools.product(args.compressors, args.programs)
    ]


def arm_names() -> list[str]:
    """The names of all arms, the first one again at the end."""
    names = [
        f"{parts} part{'s'[: parts > 1]}, {channels} channel{'s'[: channels > 1]}"
        for parts, channels in itertools.product(PARTS, CHANNELS)
    ]
    return [*names, f"{names[0]}, again"]


# -------------------------------------------------------------------- in each rank


class Arm:
    """A model and its attachment.

    Args:
        grads: gradients of the parameters by name, the same for all arms. The large one comes last, so it is the first
            to be launched, like that of an output layer.
        plan: the plan to synchronise by.
    """

    def __init__(self, grads: dict[str, torch.Tensor], plan: sync.Plan) -> None:
        self._grads = grads
        self._model = torch.nn.Module()
        for name, grad in grads.items():
            # nothing is trained: the parameters' values do not matter, so each shares the memory of its gradient
            self._model.register_parameter(name, torch.nn.Parameter(grad.detach()))
        self.attachment = sync.attach(self._model, plan)

    def step(self, path: Path) -> list[Busy]:
        """Run and trace a step; returns the busy times by rank on rank 0, an empty list on the others."""
        parameters = list(self._model.parameters())
        self._model.zero_grad(set_to_none=False)
        with sync.record_timeline(path):
            torch.autograd.backward(parameters, list(self._grads.values()))
        return [busy(spans) for spans in read_trace(path).values()] if dist.get_rank() == 0 else []


def plans(grads: dict[str, torch.Tensor], spec: str, program: sync.programs.Program) -> dict[str, sync.Plan]:
    """Plans by name: one for each number of parts and channels, and the first again."""
    world_size, by_name = dist.get_world_size(), {}
    parameters = [(name, torch.nn.Parameter(grad)) for name, grad in grads.items()]
    whole = sync.uniform_plan(parameters, gckernels.from_spec(spec), program=program, world_size=world_size)
    for name, (parts, channels) in zip(arm_names(), itertools.product(PARTS, CHANNELS), strict=False):
        plan = whole if parts == 1 else whole.parted(-(-grads["large"].numel() // parts))
        if len(plan.units) != SMALL + parts:
            raise SystemExit(
                f"--numel {grads['large'].numel()} is too small for {parts} parts beside parameters of {SMALL_SHAPE}"
            )
        by_name[name] = dataclasses.replace(plan, channels=channels)
    first, *_, again = arm_names()
    return by_name | {again: by_name[first]}


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure all arms of a compressor and a program; returns their rows on rank 0, an empty list on the others."""
    spec, name = str(cell.columns["compressor"]), str(cell.columns["program"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = {f"small{index}": SMALL_SHAPE for index in range(SMALL)} | {"large": (args.numel // 1024, 1024)}
    grads = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    planned = plans(grads, spec, programs(args.world_size)[name])
    # parameters share the memory of their gradients, which the broadcast from rank 0 would overwrite
    arms = {key: Arm({each: grad.clone() for each, grad in grads.items()}, plan) for key, plan in planned.items()}
    with tempfile.TemporaryDirectory() as folder:
        steps = {key: functools.partial(arm.step, Path(folder) / "trace.json") for key, arm in arms.items()}
        results = take_turns(steps, args.rounds, WARM_UP)
    rows: list[Row] = []
    if dist.get_rank() == 0:
        spans = {key: [max(rank.span_s for rank in step) for step in each] for key, each in results.items()}
        first = next(iter(spans.values()))
        for key, each in results.items():
            handle, plan = arms[key].attachment, planned[key]
            row: Row = {"arm": key, "span_s": f"{statistics.median(spans[key]):.5f}"}
            row |= ratio_columns(spans[key], first, "ratio_to_first")
            for column in ("compute_s", "communicate_s", "either_s", "hidden_share"):
                means = [statistics.fmean(getattr(rank, column) for rank in step) for step in each]
                row[column] = f"{statistics.median(means):.{3 if column == 'hidden_share' else 5}f}"
            dtypes = dict.fromkeys(grads, torch.float32)
            row["residual_nbytes"] = handle.residual_nbytes()
            row["plan_nbytes"] = sum(plan_nbytes(plan, dtypes, plan.topology_of(args.world_size)))
            row["sent_nbytes_per_step"] = f"{handle.sent_nbytes_per_step():.0f}"
            rows.append(row)
    for arm in arms.values():
        arm.attachment.close()
    return rows


def main() -> int:
    return cells.main(Measurement("overlap", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
