"""How far replays of traced training steps are from the measured steps, on links of a known rate.

    python -m bench.sync.replay_error
    python -m bench.sync.replay_error --world-size 4 --rates 100mbit --rounds 20

Every rate gets a separate network of ranks (``sync/lab``, needs root). DDP models with compressors take turns.
Each step is traced, and its measured stage durations are replayed on virtual lanes. Rows of
``bench/results/cpu/replay_error.csv`` have, over all rounds and ranks, the median and the extremes of the relative
error of the replayed span. ``error`` is that of the durations alone. ``structure_error`` is the largest error when the
measured hand-overs between threads are added: it shows whether virtual lanes wait as the real ones do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

import gckernels
from bench.lib import cells
from bench.lib.arms import Arm, Setting
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.rounds import take_turns
from bench.lib.sizes import two_or_more
from gckernels import sync
from gckernels.sync.lab import UNTHROTTLED, Network, checked_rate
from harness.replay import Replay, read_steps, replay

KEY = ("rate", "world_size", "arm")
PRINTED = ("arm", "median_s", "error", "least_error", "largest_error", "structure_error")
ROUNDS, WARM_UP = 20, 3
NEVER = 10**9
MAX_NUMEL = 2**18
# compressor, program, channels, whether parameters are cut into parts
ARMS = (
    ("Identity", "allreduce", 1, False),
    ("Cast16", "encoded_allreduce", 1, False),
    ("BlockQuant", "alltoall", 2, False),
    ("BlockQuant", "ring", 2, True),
    ("EFSignSGD", "allgather", 1, False),
    ("EFSignSGD", "hierarchical", 1, False),
    ("TopK(ratio=0.01)", "parameter_server", 2, True),
    ("PowerSGD(rank=4)", "powersgd", 1, False),
)


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    rates = ["100mbit", "1gbit", UNTHROTTLED]
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=rates, help='"none" does not throttle')
    parser.add_argument("--world-size", type=two_or_more, default=2)
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each rate."""
    arms = tuple(f"{spec}, {program}" for spec, program, *_ in ARMS)
    shared = {"world_size": args.world_size, "rounds": args.rounds}
    return [Cell(Network(args.world_size, rate), {"rate": rate} | shared, arms) for rate in args.rates]


def arm_of(spec: str, program: str, channels: int, is_parted: bool, setting: Setting) -> Arm:
    """A model with a plan.

    Args:
        spec: the compressor.
        program: name of the program; with ``"allreduce"``, gradients are averaged in place by a hook, because the
            compression that the plan has instead never begins. DDP would have no hook otherwise.
        channels: number of channels.
        is_parted: whether large parameters are cut into parts.
        setting: the model, its data, and the machines.
    """
    ranks, in_place = dist.get_world_size(), program == "allreduce"
    programs: dict[str, sync.programs.Program] = {**sync.programs.PROGRAMS, "ring": sync.programs.ring(ranks)}
    parameters = list(setting.workload.model().named_parameters())
    steps = None if in_place else programs[program]
    codec = gckernels.from_spec("EFSignSGD" if in_place else spec)
    plan = sync.uniform_plan(parameters, codec, program=steps, topology=setting.topology, world_size=ranks)
    plan = dataclasses.replace(plan, channels=channels)
    return Arm(plan.parted(MAX_NUMEL) if is_parted else plan, setting, start_step=NEVER if in_place else 0)


def replays(arm: Arm, path: Path) -> list[tuple[Replay, Replay]]:
    """Trace a step; returns each rank's replays without and with hand-overs on rank 0, nothing on the others."""
    arm.traced(path)
    if dist.get_rank() != 0:
        return []
    recorded = [messages for steps in read_steps(path).values() for messages in steps.values()]
    return [(replay(messages), replay(messages, with_hand_overs=True)) for messages in recorded]


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the replays of all arms; returns their rows on rank 0, an empty list on the others."""
    ranks = cell.network.ranks
    topology = sync.Topology(ranks) if ranks % 2 else sync.Topology(ranks // 2, 2)
    setting = dataclasses.replace(Setting.of("mlp", cell.network), topology=topology)
    arms = {name: arm_of(*settings, setting) for name, settings in zip(cell.arms, ARMS, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        steps = {name: functools.partial(replays, arm, path) for name, arm in arms.items()}
        results = take_turns(steps, args.rounds, WARM_UP)
    for arm in arms.values():
        arm.close()
    return [row_of(name, rounds) for name, rounds in results.items()] if dist.get_rank() == 0 else []


def row_of(name: str, rounds: list[list[tuple[Replay, Replay]]]) -> Row:
    """The row of an arm, given the replays of every round, by rank, without and with hand-overs."""
    pairs = [pair for each in rounds for pair in each]
    errors = [alone.error for alone, _ in pairs]
    structure = [abs(complete.error) for _, complete in pairs]
    row: Row = {"arm": name, "median_s": f"{statistics.median(alone.measured_s for alone, _ in pairs):.5f}"}
    row |= {"error": f"{statistics.median(errors):.4f}", "least_error": f"{min(errors):.4f}"}
    return row | {"largest_error": f"{max(errors):.4f}", "structure_error": f"{max(structure):.6f}"}


def main() -> int:
    return cells.main(Measurement("replay_error", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
