"""Predicted and measured training steps of plans on links of a known rate, and the regret of the plan that is chosen.

    python -m bench.sync.predictions --models transformer_10m --networks 2 --rates 200mbit 1gbit none
    python -m bench.sync.predictions --models mlp --networks 4 --rates 100mbit --resume

Every model, network and rate is a cell with links of its own (``sync/lab``, needs root). Every rank keeps to its part
of the cores, as if it had a machine. In each cell the machine is profiled (``sync.profile``), and the model's plain
steps are traced (``sync.trace_model``) before and after that. The plans are made and predicted with that profile and
the trace of median length. Then copies of the model with these plans take turns within one process, as in ``steps.py``.

Rows of ``bench/results/cpu/predictions.csv`` have the predicted step, the median of the measured steps, and the
relative error of the prediction. The column ``accuracy`` says for which accuracy the plan is; ``auto`` chooses among
everything that its accuracy allows. The column ``regret`` is how much longer the step of ``auto`` is than the shortest
measured step of its accuracy, including plain DDP and itself: the median of the ratios of the same rounds, minus 1.
Values below the noise floor (the arm "plain again") mean nothing. ``recorded_s`` is the step of the trace, without any
communication, and ``alone_s`` the same measured among the arms, without the copies into DDP's buckets: if they differ
much, the machine has changed meanwhile. ``stolen`` is the part of the cores that a host of virtual machines gave to
others meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gckernels
from bench.lib import cells
from bench.lib.arms import AGAIN, PLAIN, WARM_UP, Arm
from bench.lib.binding import keep_to_own_cores
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.models import WORKLOADS
from bench.lib.rounds import ratio_columns, take_turns
from bench.sync.steps import RATES, ROUNDS_MIN, ranks_of, slowest, throttle
from gckernels import sync
from gckernels.compressor import Compressor
from gckernels.sync.accuracy.accuracy import allowed_compressors, relative_error
from gckernels.sync.lab import UNTHROTTLED, Network, checked_rate
from gckernels.sync.planner.choice import POLICIES
from gckernels.sync.planner.drafts.problem import Problem
from gckernels.sync.planner.machines.files import profile_to_json
from gckernels.sync.planner.machines.machine import MachineError
from gckernels.sync.planner.timeline.pricing import Pricer
from gckernels.sync.planner.timeline.timeline import timeline
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace

KEY = ("model", "network", "rate", "arm")
PRINTED = ("arm", "accuracy", "predicted_s", "median_s", "error", "ratio_to_plain", "regret")
TURN_S, MAX_STEPS = 0.6, 12  # seconds of an arm in its turn, and its steps at most
COLD_STEPS, ALONE_STEPS = 2, 6
ROUNDS, BUDGET_S, PROFILE_S, RECORDED_STEPS, RECORDINGS = 20, 60, 60, 20, 3
FRESH_STEPS = 40  # a model's first steps can take twice as long in a virtual machine, whose memory is not there yet
SAFE = ("Cast16", "BlockQuant", "BlockQuant(bits=4)")
OTHERS = ("QSGD", "EFSignSGD", "ChunkTopK", "PowerSGD(rank=4)")
THROUGH = {
    "BlockQuant through alltoall": ("BlockQuant", "alltoall"),
    "EFSignSGD through alltoall": ("EFSignSGD", "alltoall"),
}
AUTO = {"auto, safe": SAFE, "auto, aggressive": (*SAFE, *OTHERS)}
ARMS = (PLAIN, AGAIN, *SAFE, *OTHERS, *THROUGH, *AUTO)


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["mlp", "transformer_10m"])
    parser.add_argument("--networks", nargs="+", type=ranks_of, default=[(2, 1)], metavar="RANKS", help="2 or 2x2")
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=list(RATES))
    parser.add_argument("--local-rate", type=checked_rate, default="10gbit", help="of links inside machines")
    parser.add_argument("--budget-s", type=int, default=BUDGET_S, help="seconds for the rounds of a cell")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the profiles and traces there")
    parser.add_argument("--profile-s", type=int, default=PROFILE_S, help="seconds for the profile of a cell")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""
    found = []
    for model, (machines, ranks), rate in itertools.product(args.models, args.networks, args.rates):
        local_rate = args.local_rate if ranks > 1 else UNTHROTTLED
        columns: dict[str, str | int] = {
            "model": model,
            "network": f"{machines}x{ranks}" if ranks > 1 else str(machines),
        }
        columns |= {"rate": rate, "local_rate": local_rate, "max_rounds": args.rounds}
        columns |= {"budget_s": args.budget_s, "profile_s": args.profile_s}
        found.append(Cell(Network(machines * ranks, rate, ranks, local_rate), columns, ARMS))
    return found


@dataclass(frozen=True)
class Planned:
    """A plan, and what was predicted of it.

    Attributes:
        plan: the plan; ``None`` for plain DDP.
        predicted_s: seconds of a step; ``None`` if the profile lacks a price.
        error: relative error of the gradients.
        planning_s: seconds that the choice took.
    """

    plan: sync.Plan | None
    predicted_s: float | None
    error: float
    planning_s: float = 0.0


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows on rank 0, an empty list on the others."""
    keep_to_own_cores()
    workload = WORKLOADS[str(cell.columns["model"])]
    batch = workload.batch(torch.Generator().manual_seed(dist.get_rank()))
    topology = sync.Topology(cell.network.machines, cell.network.ranks_per_machine)
    methods = [gckernels.from_spec(spec) for spec in ("Identity", *SAFE, *OTHERS)]
    throttle(cell.network, UNTHROTTLED)  # the first steps send everything, which would take minutes
    plain = Arm(PLAIN, workload, batch, topology)
    for _ in range(FRESH_STEPS):
        plain.step()
    traces = [_recorded(plain, methods)]
    throttle(cell.network, cell.network.rate)
    profile = sync.profile(seconds=args.profile_s, compressors=methods, topology=topology)
    if dist.get_rank() == 0:
        print(f"profile: {profile.stamp.seconds:.0f} s, margin {profile.margin:.1%}", flush=True)
        for what, each in (
            ("left out", profile.left_out),
            ("refused", profile.refused),
            ("doubtful", profile.doubtful),
        ):
            print(f"{what}: {'; '.join(each) or 'nothing'}", flush=True)
    throttle(cell.network, UNTHROTTLED)
    traces += [_recorded(plain, methods) for _ in range(RECORDINGS - 1)]
    trace = sorted(traces, key=_computing_s)[RECORDINGS // 2]
    if args.keep is not None and dist.get_rank() == 0:
        args.keep.mkdir(parents=True, exist_ok=True)
        name = "_".join(str(cell.columns[column]) for column in ("model", "network", "rate"))
        (args.keep / f"{name}.profile.json").write_text(json.dumps(profile_to_json(profile)))
        trace.save(args.keep / f"{name}.trace.json")
    planned = _planned(trace, Pricer(profile), plain.model, topology)
    arms = {PLAIN: plain}
    for name in ARMS[1:]:
        plan = planned[name].plan
        arms[name] = Arm(PLAIN if plan is None else plan, workload, batch, topology)
    take_turns({name: arm.step for name, arm in arms.items()}, 0, WARM_UP)
    throttle(cell.network, cell.network.rate)
    steps = {name: functools.partial(_turn, arm, _steps_in_turn(planned[name])) for name, arm in arms.items()}
    steps["alone"] = functools.partial(_alone, plain)
    start_s = time.monotonic()
    take_turns(steps, 0, 1)
    (round_s,) = slowest([(time.monotonic() - start_s,)]).flatten().tolist()
    rounds = min(args.rounds, max(ROUNDS_MIN, round(args.budget_s / round_s)))
    seconds = {name: slowest(each)[:, 0].tolist() for name, each in take_turns(steps, rounds, 0).items()}
    alone_s = statistics.median(seconds.pop("alone"))
    parts = {"alone_s": f"{alone_s:.5f}"}
    parts["recorded_s"] = f"{_computing_s(trace):.5f}"
    parts |= {"profile_margin": f"{profile.margin:.3f}", "profiled_s": f"{profile.stamp.seconds:.0f}"}
    rows = [_row(name, planned[name], seconds) | parts for name in ARMS]
    for arm in arms.values():
        arm.close()
    return rows if dist.get_rank() == 0 else []


def _recorded(plain: Arm, methods: Sequence[Compressor]) -> ModelTrace:
    """The trace of some steps of plain DDP."""
    recording = sync.trace_model(plain.model, steps=RECORDED_STEPS, compressors=methods)
    while not recording.done:
        plain.step()
    return recording.trace


def _computing_s(trace: ModelTrace) -> float:
    """The seconds of a step without communication."""
    return trace.forward_s + trace.backward_s + trace.optimizer_s


def _steps_in_turn(planned: Planned) -> int:
    """The steps of an arm in each of its turns."""
    return max(1, min(MAX_STEPS, int(TURN_S / (planned.predicted_s or TURN_S / 4))))


def _turn(arm: Arm, count: int) -> tuple[float]:
    """Train some steps and return their median seconds, without the first ones, before which other arms had the
    caches."""
    seconds = [arm.step()[0] for _ in range(count)]
    return (statistics.median(seconds[COLD_STEPS:] or seconds[-1:]),)


def _alone(arm: Arm) -> tuple[float]:
    """Train steps in which nothing is sent, and return their median seconds, without the first ones."""
    seconds = [sum(arm.alone()) for _ in range(ALONE_STEPS)]
    return (statistics.median(seconds[COLD_STEPS:]),)


def _planned(trace: ModelTrace, pricer: Pricer, model: torch.nn.Module, topology: sync.Topology) -> dict[str, Planned]:
    """The plan of every arm with its prediction, made by rank 0; collective."""
    made: list[dict[str, Any]] = [{}]
    if dist.get_rank() == 0:
        plans = {name: _plan_of(name, trace, pricer, model, topology) for name in ARMS}
        records: dict[str, list[Any]] = {}
        predicted_s: float | None
        for name, (plan, planning_s) in plans.items():
            try:
                predicted_s = timeline(plan, trace, pricer, Frontend.DDP).step_s
            except MachineError as error:
                print(f"{name}: not predicted: {error}", flush=True)
                predicted_s = None
            records[name] = [json.dumps(plan.to_json()), predicted_s, relative_error(plan, trace), planning_s]
        made = [records]
    dist.broadcast_object_list(made)
    return {
        name: Planned(
            None if name in (PLAIN, AGAIN) else sync.Plan.from_json(json.loads(text)), predicted_s, error, planning_s
        )
        for name, (text, predicted_s, error, planning_s) in made[0].items()
    }


def _plan_of(
    name: str, trace: ModelTrace, pricer: Pricer, model: torch.nn.Module, topology: sync.Topology
) -> tuple[sync.Plan, float]:
    """The plan of an arm, and the seconds that its choice took."""
    start_s = time.perf_counter()
    if name in (PLAIN, AGAIN):
        plan = POLICIES["none"](Problem(trace, pricer, Frontend.DDP))
    elif name in AUTO:
        allowed = allowed_compressors(trace, [gckernels.from_spec(spec) for spec in AUTO[name]])
        plan = POLICIES["auto"](Problem(trace, pricer, Frontend.DDP, allowed))
    else:
        compressor, program = THROUGH.get(name, (name, None))
        plan = sync.uniform_plan(model, compressor, program=program, topology=topology)
    return plan, time.perf_counter() - start_s


def _row(name: str, planned: Planned, seconds: Mapping[str, Sequence[float]]) -> Row:
    measured_s = statistics.median(seconds[name])
    row: Row = {"arm": name, "accuracy": _accuracy(name), "rounds": len(seconds[name])}
    predicted_s = planned.predicted_s
    row |= {"predicted_s": "" if predicted_s is None else f"{predicted_s:.5f}", "median_s": f"{measured_s:.5f}"}
    row |= {"error": "" if predicted_s is None else f"{predicted_s / measured_s - 1:+.3f}"}
    row |= ratio_columns(seconds[name], seconds[PLAIN], "ratio_to_plain")
    row |= {"gradient_error": f"{planned.error:.3f}", "planning_s": f"{planned.planning_s:.2f}", "regret": ""}
    if name in AUTO:
        rivals = [PLAIN, name, *AUTO[name], *(arm for arm, (spec, _) in THROUGH.items() if spec in AUTO[name])]
        best = min(rivals, key=lambda rival: statistics.median(seconds[rival]))
        ratios = [mine / other for mine, other in zip(seconds[name], seconds[best], strict=True)]
        row["regret"] = f"{statistics.median(ratios) - 1:.3f}"
    return row


def _accuracy(name: str) -> str:
    if name in (PLAIN, AGAIN):
        return "exact"
    return "safe" if name == "auto, safe" or name.partition(" ")[0] in SAFE or name in SAFE else "aggressive"


def main() -> int:
    return cells.main(Measurement("predictions", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
