"""Predicted beside measured steps of models of FSDP2, on links of a known rate.

    python -m bench.sync.sharded_predictions --rates 20mbit 100mbit
    python -m bench.sync.sharded_predictions --networks 2x2 --local-rate 1gbit --rates 20mbit 100mbit

In each cell (``bench/sync/sharded.py``) steps with FSDP's own collectives are recorded on links that are not throttled,
and a profile is measured on throttled ones. Predictions follow from both, for FSDP's own collectives and for arms with
one compressor. Rows of ``bench/results/cpu/sharded_predictions.csv`` have the predicted and the median measured time of
a step, the error, and both relative to FSDP's own collectives.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch.distributed as dist

import gckernels
from bench.lib import cells
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import throttle
from bench.lib.contenders import from_rank_0
from bench.lib.cores import keep_to_own_cores
from bench.lib.rounds import slowest, take_turns, turns_within
from bench.lib.sharded_tables import NATIVE, WEIGHTS
from bench.sync.sharded import RATES, ROUNDS_MIN, WARM_UP, WITH_WEIGHTS, ShardedArm
from gckernels import planner, sync
from gckernels.planner.choice import policy_of
from gckernels.planner.drafts.problem import Problem, shards_of
from gckernels.planner.machines.machine import Machine, MachineError, Replicas, Sharding
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.lab import UNTHROTTLED, Network
from gckernels.sync.plans.arguments import as_weights
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace

KEY = ("model", "network", "rate", "arm")
PRINTED = ("arm", "predicted_s", "median_s", "error", "predicted_ratio", "measured_ratio")
ARMS = (NATIVE, "Identity", "BlockQuant(bits=4)")
METHODS = ("Identity", "BlockQuant", "BlockQuant(bits=4)")
FRESH_STEPS, RECORDED_STEPS, ROUNDS, BUDGET_S, PROFILE_S = 20, 20, 20, 60, 60


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, ["transformer_1m"], RATES, BUDGET_S)
    parser.add_argument("--profile-s", type=int, default=PROFILE_S, help="seconds for the profile of a cell")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""

    def arms(network: Network) -> list[str]:
        return [*ARMS, *(WITH_WEIGHTS if network.ranks_per_machine == 1 else ())]

    return cells.grid(args, arms, profile_s=args.profile_s)


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows."""
    keep_to_own_cores()
    network, methods = cell.network, [gckernels.from_spec(spec) for spec in METHODS]
    arms = {spec: ShardedArm(spec, str(cell.columns["model"]), network) for spec in cell.arms}
    native = arms[NATIVE]
    throttle(network, UNTHROTTLED)
    for _ in range(FRESH_STEPS):
        native.step()
    recording = sync.trace_model(native.model, steps=RECORDED_STEPS, compressors=methods)
    while not recording.done:
        native.step()
    throttle(network, network.rate)
    topology = sync.Topology(network.machines, network.ranks_per_machine)
    profile = planner.profile(seconds=args.profile_s, compressors=methods, topology=topology)
    if dist.get_rank() == 0 and profile.left_out:
        print(f"left out of the profile: {'; '.join(profile.left_out)}", flush=True)
    predicted_s = from_rank_0(lambda: {spec: predicted(spec, recording.trace, profile, network) for spec in arms})
    steps = {spec: arm.step for spec, arm in arms.items()}
    take_turns(steps, 0, WARM_UP)
    results = turns_within(steps, args.budget_s, ROUNDS_MIN, args.rounds)
    seconds = {spec: slowest(each)[:, 0].tolist() for spec, each in results.items()}
    rows: list[Row] = []
    for spec, arm in arms.items():
        median_s = statistics.median(seconds[spec])
        measured_ratio = statistics.median(
            one / other for one, other in zip(seconds[spec], seconds[NATIVE], strict=True)
        )
        row: Row = {"arm": spec, "rounds": len(seconds[spec])}
        found_s, native_s = predicted_s[spec], predicted_s[NATIVE]
        row |= {"predicted_s": "" if found_s is None else f"{found_s:.5f}", "median_s": f"{median_s:.5f}"}
        row |= {"error": "" if found_s is None else f"{found_s / median_s - 1:+.3f}"}
        row |= {"predicted_ratio": "" if found_s is None or native_s is None else f"{found_s / native_s:.3f}"}
        row |= {"measured_ratio": f"{measured_ratio:.3f}", "profile_margin": f"{profile.margin:.3f}"}
        rows.append(row)
        if arm.attachment is not None:
            arm.attachment.close()
    return rows


def predicted(spec: str, trace: ModelTrace, machine: Machine, network: Network) -> float | None:
    """The predicted seconds of a step of an arm; ``None`` if the machine lacks a price."""
    plan, _, weights = spec.partition(WEIGHTS)
    inside = network.ranks_per_machine
    if inside > 1:
        pricer, frontend, trace = Pricer(Replicas(machine), Sharding(inside)), Frontend.HSDP, shards_of(trace, inside)
    else:
        pricer, frontend = Pricer(machine, Sharding()), Frontend.FSDP
    if plan in (NATIVE, "Identity"):
        allowed = {}
    else:
        method = gckernels.from_spec(plan)
        allowed = {tensor.name: (method,) for tensor in trace.tensors if len(tensor.shape or ()) > 1}
    problem = Problem(trace, pricer, frontend, allowed, weights=as_weights("weights", weights) if weights else None)
    try:
        return problem.step_s(policy_of("none" if plan == NATIVE else f"all:{plan}")(problem))
    except MachineError as error:
        print(f"{spec}: not predicted: {error}", flush=True)
        return None


def main() -> int:
    return cells.main(Measurement("sharded_predictions", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
