"""Predicted and measured training steps of plans on links of a known rate, and the regret of the plan that is chosen.

    python -m bench.sync.predictions --models transformer_10m --networks 2 --rates 200mbit 1gbit none
    python -m bench.sync.predictions --models mlp --networks 4 --rates 100mbit --resume

Every model, network and rate is a cell with links of its own (``sync/lab``, needs root). Every rank keeps to its part
of the cores, as if it had a machine. In each cell the machine is profiled (``planner.profile``), and the model's plain
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
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

import gckernels
from bench.lib import cells
from bench.lib.arms import AGAIN, PLAIN, THROUGH, WARM_UP, Arm, Setting, plan_of
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import throttle
from bench.lib.contenders import Planned, from_rank_0
from bench.lib.cores import keep_to_own_cores
from bench.lib.rounds import ratio_columns, slowest, take_turns, turns_within
from bench.sync.steps import RATES, ROUNDS_MIN
from gckernels import planner, sync
from gckernels.compressor import Compressor
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.machine import MachineError
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import timeline
from gckernels.sync.accuracy.accuracy import allowed_compressors, relative_error
from gckernels.sync.lab import UNTHROTTLED
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
PARTITIONED = ("BlockQuant through alltoall", "EFSignSGD through alltoall")
AUTO = {"auto, safe": SAFE, "auto, aggressive": (*SAFE, *OTHERS)}
ARMS = (PLAIN, AGAIN, *SAFE, *OTHERS, *PARTITIONED, *AUTO)


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, ["mlp", "transformer_10m"], RATES, BUDGET_S)
    parser.add_argument("--profile-s", type=int, default=PROFILE_S, help="seconds for the profile of a cell")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""
    return cells.grid(args, lambda network: ARMS, profile_s=args.profile_s)


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows."""
    keep_to_own_cores()
    setting = Setting.of(str(cell.columns["model"]), cell.network)
    methods = [gckernels.from_spec(spec) for spec in ("Identity", *SAFE, *OTHERS)]
    throttle(cell.network, UNTHROTTLED)  # the first steps send everything, which would take minutes
    plain = Arm(PLAIN, setting)
    for _ in range(FRESH_STEPS):
        plain.step()
    traces = [_recorded(plain, methods)]
    throttle(cell.network, cell.network.rate)
    profile = planner.profile(seconds=args.profile_s, compressors=methods, topology=setting.topology)
    if dist.get_rank() == 0:
        print(f"profile: {profile.stamp.seconds:.0f} s, margin {profile.margin:.1%}", flush=True)
        for what, each in (
            ("left out", profile.left_out),
            ("bad", profile.bad),
            ("doubtful", profile.doubtful),
        ):
            print(f"{what}: {'; '.join(each) or 'nothing'}", flush=True)
    throttle(cell.network, UNTHROTTLED)
    traces += [_recorded(plain, methods) for _ in range(RECORDINGS - 1)]
    trace = sorted(traces, key=lambda trace: trace.computing_s)[RECORDINGS // 2]
    planned = from_rank_0(lambda: _planned(trace, Pricer(profile), plain.model, setting.topology))
    arms = {PLAIN: plain}
    for name in ARMS[1:]:
        arms[name] = Arm(PLAIN if name == AGAIN else planned[name].plan, setting)
    take_turns({name: arm.step for name, arm in arms.items()}, 0, WARM_UP)
    throttle(cell.network, cell.network.rate)
    steps = {name: functools.partial(_turn, arm, _steps_in_turn(planned[name])) for name, arm in arms.items()}
    steps["alone"] = functools.partial(_alone, plain)
    results = turns_within(steps, args.budget_s, ROUNDS_MIN, args.rounds)
    seconds = {name: slowest(each)[:, 0].tolist() for name, each in results.items()}
    alone_s = statistics.median(seconds.pop("alone"))
    parts = {"alone_s": f"{alone_s:.5f}"}
    parts["recorded_s"] = f"{trace.computing_s:.5f}"
    parts |= {"profile_margin": f"{profile.margin:.3f}", "profiled_s": f"{profile.stamp.seconds:.0f}"}
    rows = [_row(name, planned[name], seconds) | parts for name in ARMS]
    for arm in arms.values():
        arm.close()
    return rows


def _recorded(plain: Arm, methods: Sequence[Compressor]) -> ModelTrace:
    """The trace of some steps of plain DDP."""
    recording = sync.trace_model(plain.model, steps=RECORDED_STEPS, compressors=methods)
    while not recording.done:
        plain.step()
    return recording.trace


def _steps_in_turn(planned: Planned) -> int:
    """The steps of an arm in each of its turns."""
    return max(1, min(MAX_STEPS, int(TURN_S / (planned.step_s or TURN_S / 4))))


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
    """The plan of every arm with its prediction."""
    found = {}
    for name in ARMS:
        start_s = time.perf_counter()
        if name in (PLAIN, AGAIN):
            plan = POLICIES["none"](Problem(trace, pricer, Frontend.DDP))
        elif name in AUTO:
            allowed = allowed_compressors(trace, [gckernels.from_spec(spec) for spec in AUTO[name]])
            plan = POLICIES["auto"](Problem(trace, pricer, Frontend.DDP, allowed))
        else:
            plan = plan_of(name, model, topology)
        planning_s, predicted_s = time.perf_counter() - start_s, None
        try:
            predicted_s = timeline(plan, trace, pricer, Frontend.DDP).step_s
        except MachineError as error:
            print(f"{name}: not predicted: {error}", flush=True)
        found[name] = Planned(plan, predicted_s, relative_error(plan, trace), planning_s)
    return found


def _row(name: str, planned: Planned, seconds: Mapping[str, Sequence[float]]) -> Row:
    measured_s = statistics.median(seconds[name])
    row: Row = {"arm": name, "accuracy": _accuracy(name), "rounds": len(seconds[name])}
    predicted_s = planned.step_s
    row |= {"predicted_s": "" if predicted_s is None else f"{predicted_s:.5f}", "median_s": f"{measured_s:.5f}"}
    row |= {"error": "" if predicted_s is None else f"{predicted_s / measured_s - 1:+.3f}"}
    row |= ratio_columns(seconds[name], seconds[PLAIN], "ratio_to_plain")
    row |= {"gradient_error": f"{planned.error:.3f}", "planning_s": f"{planned.planning_s:.2f}", "regret": ""}
    if name in AUTO:
        rivals = [PLAIN, name, *AUTO[name], *(arm for arm in PARTITIONED if arm.partition(THROUGH)[0] in AUTO[name])]
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
