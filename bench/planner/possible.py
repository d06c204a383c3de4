"""Predicted steps beside the least time that links and ranks need for them, of all shipped traces on all machines.

    python -m bench.planner.possible
    python -m bench.planner.possible --machines utility-p3-8xlarge --traces resnet50

Each row of ``possible.csv`` is a plan: that of ``none``, that of ``auto`` without compressors (``exact``), or that of
``auto`` with the compressors of ``--compressors``. ``links_ms`` is the time that its bytes take on the link that has to
carry most of them, and ``ranks_ms`` the time that the rank with most to do computes or copies. Both are added up over
all machines and ranks, collective by collective, without a timeline. No step can be shorter, so ``ratio``, the
predicted step relative to the larger one, is at least 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
import torch

import gckernels
from bench.lib.program import program_parser
from bench.lib.record import merge_csv
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.description import Description
from gckernels.planner.machines.files import load_machine, machine_names
from gckernels.planner.machines.machine import Floats, Shared
from gckernels.planner.timeline.launches import launches_of, messages_of
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend, Plan, UnitPlan
from gckernels.sync.programs.layouts import Capabilities, propagate
from gckernels.sync.programs.residuals import has_part
from gckernels.sync.programs.sizes import Data, sizes_of
from gckernels.sync.programs.stages import takes_part
from gckernels.sync.programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Hop,
    Level,
    Place,
    Reduce,
    ReduceScatter,
    Step,
)
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.trace_files import trace_names

COMPRESSORS = ("EFSignSGD", "BlockQuant(bits=4)")
PLANS = ("none", "exact", "auto")
KEY = ("machine", "trace", "plan")
_LINKS = (Shared.INTER, Shared.INTRA)


def parse_args() -> argparse.Namespace:
    parser = program_parser(__doc__)
    parser.add_argument("--machines", nargs="+", default=machine_names(), help="names or files of descriptions")
    parser.add_argument("--traces", nargs="+", default=trace_names(), help="names or files")
    parser.add_argument("--compressors", nargs="+", default=COMPRESSORS, metavar="SPEC")
    return parser.parse_args()


def links_s(plan: Plan, trace: ModelTrace, machine: Description) -> float:
    """The seconds that the bytes of a plan take at least on the link that has to carry most of them in one direction.

    Every collective is taken to send as little as any algorithm can. Devices share links as evenly as they can.
    """
    topology, dtypes = machine.topology, {tensor.name: tensor.dtype.to_real() for tensor in trace.tensors}
    nbytes = {
        link: np.zeros((2, topology.machines, topology.devices // min(each.shared_by, topology.devices)))
        for link, each in machine.links.items()
    }
    for unit in plan.units:
        sizes = sizes_of(unit.program, unit.numel, dtypes[unit.parameter], unit.compressor, topology)
        for step, before, after in zip(unit.program, sizes, sizes[1:], strict=False):
            if isinstance(step, Collective):
                _carry(nbytes, step, before, after, unit, machine)
    return max(float(each.max()) / machine.links[link].byte_per_s for link, each in nbytes.items())


def _carry(
    nbytes: dict[Shared, Floats], step: Collective, before: Data, after: Data, unit: UnitPlan, machine: Description
) -> None:
    """Add what each link has to carry for a step: ``[in and out, machines, links of a machine]``."""
    topology, level = machine.topology, step.level
    machines, devices = topology.machines, topology.devices
    at, device = divmod(unit.root, devices)
    if level == Level.FLAT and min(machines, devices) > 1:
        cards = nbytes[Shared.INTER]
        only = [device // (devices // cards.shape[2])] if isinstance(step, Gather) else range(cards.shape[2])
        cards[:, :, only] += _between_machines(step, before.nbytes, after.nbytes, at, machine)[:, :, None] / len(only)
        return
    between = level == Level.INTER or (level == Level.FLAT and machines > 1)
    links = nbytes.get(Shared.INTER if between else Shared.INTRA)
    if links is None:
        return
    each = _in_group(step, before.nbytes, after.nbytes, topology.size(level), at if between else device)
    for rank in range(topology.world_size):
        if has_part(before.flow, topology, rank, unit.root) or isinstance(step, Broadcast):
            if isinstance(step, Broadcast) and not has_part(after.flow, topology, rank, unit.root):
                continue
            here, place = divmod(rank, devices)
            links[:, here, place // (devices // links.shape[2])] += each[:, here if between else place]


def _in_group(step: Step, before: float, after: float, ranks: int, root: int) -> Floats:
    """``[in and out, ranks]``, the bytes of each rank of a collective of one level."""
    nbytes = np.zeros((2, ranks))
    others = np.arange(ranks) != root
    match step:
        case AllReduce():
            nbytes[:] = 2 * (ranks - 1) / ranks * before
        case ReduceScatter() | AllToAll():
            nbytes[:] = (ranks - 1) / ranks * before
        case AllGather():
            nbytes[0] = (ranks - 1) * before
        case Hop():
            nbytes[:] = after
        case Gather():
            nbytes[0, root], nbytes[1, others] = (ranks - 1) * before, before
        case Reduce():
            nbytes[0, root], nbytes[1, others] = before, before
        case Broadcast():
            nbytes[0, others], nbytes[1, root] = before, before
    return nbytes


def _between_machines(step: Step, before: float, after: float, root: int, machine: Description) -> Floats:
    """``[in and out, machines]``, the bytes that cross the border of each machine in a collective of all ranks."""
    machines, devices = machine.topology.machines, machine.topology.devices
    ranks = machine.topology.world_size
    others = np.arange(machines) != root
    match step:
        case AllGather():
            return np.array([[(ranks - devices) * before], [0.0]]).repeat(machines, 1)
        case AllToAll():
            return np.full((2, machines), devices * before * (ranks - devices) / ranks)
        case Gather():
            nbytes = np.zeros((2, machines))
            nbytes[0, root], nbytes[1, others] = (ranks - devices) * before, devices * before
            return nbytes
        case ReduceScatter():
            return np.array([[0.0], [(machines - 1) / machines * before]]).repeat(machines, 1)
    return _in_group(step, before, after, machines, root)


def ranks_s(plan: Plan, trace: ModelTrace, pricer: Pricer, frontend: Frontend) -> float:
    """The seconds that the rank with most to do computes or copies at least, with everything else beside that.

    Sending takes processors as well. This is left out, because it is known only as what runs beside it loses.
    """
    machine, topology = pricer.machine, pricer.machine.topology
    seconds = {shared: np.zeros(topology.world_size) for shared in Shared if shared not in _LINKS}
    capacities = machine.capacities
    share = min(1.0, capacities.get(machine.computes_on, 1.0))
    seconds[machine.computes_on] += share * trace.computing_s
    for launch in launches_of(plan, trace, frontend) if topology.world_size > 1 else ():
        for message in messages_of(launch, plan, frontend):
            unit = message.units[0].plan
            layouts = propagate(message.program, Capabilities.of(unit.compressor), topology)
            for stage in pricer.messages([(message, launch.dtype)])[0]:
                spec, price = stage.spec, stage.price
                ranks = [takes_part(spec, message.program, layouts, topology, rank, unit.root) for rank in
                         range(topology.world_size)]  # fmt: skip
                for shared, work_s in price.work_s.items():
                    if shared in seconds and spec.level is None:
                        seconds[shared][ranks] += work_s[0]
    return max(float(each.max()) / capacities.get(shared, np.inf) for shared, each in seconds.items())


def problem_of(
    machine: str, trace: str, compressors: Sequence[str], places: tuple[Place, ...] = (Place.DEVICE,)
) -> Problem:
    """The problem in which every tensor may use all compressors."""
    traced, methods = ModelTrace.load(trace), tuple(map(gckernels.from_spec, compressors))
    allowed = {tensor.name: methods for tensor in traced.tensors} if methods else {}
    return Problem(traced, Pricer(load_machine(machine)), Frontend.MODULE, allowed, places)


def rows_of(machine: str, trace: str, compressors: Sequence[str]) -> Iterator[dict[str, str]]:
    """The rows of a trace on a machine."""
    for plan in PLANS:
        problem = problem_of(machine, trace, compressors if plan == "auto" else ())
        found = POLICIES["none" if plan == "none" else "auto"](problem)
        assert isinstance(problem.machine, Description)
        links = links_s(found, problem.trace, problem.machine)
        ranks, step_s = ranks_s(found, problem.trace, problem.pricer, problem.frontend), problem.step_s(found)
        milliseconds = {"step_ms": step_s, "links_ms": links, "ranks_ms": ranks}
        yield (
            {"machine": machine, "trace": trace, "plan": plan}
            | {name: f"{each * 1e3:.2f}" for name, each in milliseconds.items()}
            | {"ratio": f"{step_s / max(links, ranks):.3f}"}
        )


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    rows = []
    for machine in args.machines:
        for trace in args.traces:
            for row in rows_of(machine, trace, args.compressors):
                rows.append(row)
                print(*row.values(), sep="  ", flush=True)
    print("least ratio:", min(float(row["ratio"]) for row in rows))
    print("wrote", merge_csv("possible", torch.device("cpu"), rows, KEY))


if __name__ == "__main__":
    main()
