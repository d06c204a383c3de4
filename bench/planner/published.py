"""Selection times and predicted steps of every policy on the shipped traces, for the two testbeds of Espresso.

The policies are those of the planner, and their rivals of ``bench.rivals``.

    python -m bench.planner.published
    python -m bench.planner.published --machines espresso-pcie --traces bert --policies auto bound

A cell is a machine, a trace and a compressor that every tensor may use, with stages on device and host. Every policy
gets a problem of its own, so no policy finds what another one has priced. ``select_ms`` is the processor's time of a
policy, ``step_ms`` the predicted step on the timeline. The step of ``bound`` is that on a machine whose codecs take no
time. ``over_none``, ``over_bound`` and ``over_exhaustive`` are ratios of steps, ``over_least`` is that to a limit which
was computed once. All plans are too many to try for whole models. So each cell is there a second time with the first
two launches of the model alone, with stages on the device.

Machines are described, not measured: compare policies, not milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import gckernels
from bench.lib.program import program_parser
from bench.lib.record import csv_path, merge_csv, read_csv
from bench.rivals.limits import free_problem
from bench.rivals.policies import EVERY_POLICY
from gckernels.planner.drafts.drafts import usual_launches
from gckernels.planner.drafts.problem import Problem, ProblemError
from gckernels.planner.machines.files import load_machine
from gckernels.planner.machines.machine import MachineError
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend, Plan, PlanError
from gckernels.sync.programs import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.trace_files import trace_names

MACHINES = ("espresso-nvlink", "espresso-pcie")
COMPRESSORS = ("EFSignSGD", "DGC(ratio=0.01)", "RandomK(ratio=0.01)")
LAUNCHES = 2
FIRST = f", first {LAUNCHES} launches"
KEY = ("machine", "trace", "compressor", "policy")
Row = dict[str, Any]


def parse_args() -> argparse.Namespace:
    parser = program_parser(__doc__)
    parser.add_argument("--machines", nargs="+", default=MACHINES, help="names or files")
    parser.add_argument("--traces", nargs="+", default=trace_names(), help="names or files")
    parser.add_argument("--compressors", nargs="+", default=COMPRESSORS, metavar="SPEC")
    parser.add_argument("--policies", nargs="+", default=list(EVERY_POLICY), choices=list(EVERY_POLICY))
    return parser.parse_args()


def problem_of(machine: str, trace: ModelTrace, compressor: str, whole: bool) -> Problem:
    """A fresh problem; for a part of a model with its tensors up to the last of the first launches.

    Forward and optimizer, which all policies have in common, are left out.
    """
    trace = replace(trace, forward_s=0.0, optimizer_s=0.0)
    methods = (gckernels.from_spec(compressor),)
    pricer, places = Pricer(load_machine(machine)), (Place.DEVICE, Place.HOST) if whole else (Place.DEVICE,)
    allowed = {tensor.name: methods for tensor in trace.tensors}
    problem = Problem(trace, pricer, Frontend.MODULE, allowed, places)
    if whole:
        return problem
    tensors = trace.tensors[: max(usual_launches(problem)[:LAUNCHES][-1]) + 1]
    first = replace(trace, tensors=tensors, backward_s=tensors[-1].ready_s)
    return replace(problem, trace=first, allowed={tensor.name: methods for tensor in tensors})


def measured(problem: Problem, policy: str) -> Row | None:
    """The row of a policy; ``None`` if it finds no plan."""
    start_s = time.process_time()
    try:
        plan = EVERY_POLICY[policy](problem)
    except (MachineError, PlanError, ProblemError):
        return None
    select_s = time.process_time() - start_s
    judge = free_problem(problem) if policy == "bound" else problem
    timeline = judge.timeline(plan)
    return {
        "select_ms": f"{select_s * 1e3:.1f}",
        "step_ms": f"{timeline.step_s * 1e3:.2f}",
        "backward_ms": f"{timeline.backward_s * 1e3:.2f}",
        "exposed_ms": f"{timeline.exposed_s * 1e3:.2f}",
        "launches": len(timeline.launches),
        "units": len(plan.units),
        "compressed": f"{compressed_share(plan):.3f}",
    }


def compressed_share(plan: Plan) -> float:
    """The part of all elements that is compressed."""
    sizes = [(unit.numel, unit.compressor.name != "Identity") for unit in plan.units]
    return sum(numel for numel, compressed in sizes if compressed) / max(sum(numel for numel, _ in sizes), 1)


def cell(machine: str, name: str, compressor: str, policies: Sequence[str]) -> list[Row]:
    """The rows of a cell, of the whole model and of its first launches."""
    trace, rows = ModelTrace.load(name), []
    for whole in (True, False):
        EVERY_POLICY["none"](problem_of(machine, trace, compressor, whole))  # programs are enumerated once in a process
        for policy in policies:
            found = measured(problem_of(machine, trace, compressor, whole), policy)
            if found is not None:
                shown = trace.model + ("" if whole else FIRST)
                key = {"machine": machine, "trace": shown, "compressor": compressor, "policy": policy}
                rows.append(key | {"tensors": len(trace.tensors)} | found)
                print(*rows[-1].values(), sep="  ", flush=True)
    return rows


def with_distances(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Row]:
    """The rows with their distances to other policies in the same cell, which may have been measured earlier.

    The least step of a cell was computed once. Where an earlier row has its distance to it, all rows get theirs.
    """
    known = {tuple(row[column] for column in KEY): float(row["step_ms"]) for row in (*earlier, *rows)}
    least_ms = {
        _cell_of(row): float(row["step_ms"]) / float(row["over_least"]) for row in earlier if row.get("over_least")
    }

    def ratio(row: Row, base_ms: float | None) -> str:
        return "" if base_ms is None else f"{float(row['step_ms']) / base_ms:.4f}"

    columns = {"over_none": "none", "over_bound": "bound", "over_exhaustive": "exhaustive"}
    return [
        row
        | {"over_least": ratio(row, least_ms.get(_cell_of(row)))}
        | {column: ratio(row, known.get((*_cell_of(row), policy))) for column, policy in columns.items()}
        for row in rows
    ]


def _cell_of(row: Row) -> tuple[str, ...]:
    return tuple(row[column] for column in KEY[:-1])


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    for machine in args.machines:
        for trace in args.traces:
            for compressor in args.compressors:
                rows = cell(machine, trace, compressor, args.policies)
                earlier = read_csv(csv_path("policies", torch.device("cpu")))
                path = merge_csv("policies", torch.device("cpu"), with_distances(rows, earlier), KEY)
    print("wrote", path)


if __name__ == "__main__":
    main()
