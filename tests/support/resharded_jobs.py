"""Jobs with random residuals, resharded for other numbers of ranks, and the part of the mean that they still owe."""

from __future__ import annotations

from typing import Any

import torch

from gckernels.sync import Plan, UnitPlan
from gckernels.sync.programs import ENCODED_ALLREDUCE, POWERSGD, Program
from gckernels.sync.programs.residuals import ENCODINGS, encoded_regions
from gckernels.sync.resources.feedback import KINDS, Feedback
from gckernels.sync.resources.memory_spaces import Places
from gckernels.sync.states.jobs import read_job, read_own
from gckernels.sync.states.layout import residual_sizes
from gckernels.sync.states.resharding import reshard

NUMELS = (0, 1, 5, 100, 257)
EPS = 2.0**-24


def plan_of(program: Program, compressor: Any, numels: tuple[int, ...] = NUMELS, root: int = 0, **head: Any) -> Plan:
    units = [UnitPlan(f"w{numel}", numel, compressor, program, True, root=root) for numel in numels]
    return Plan(tuple(units), **head)


def saved(plan: Plan, world_size: int, seed: int = 0) -> list[dict[str, Any]]:
    """States that the ranks of a job could have saved: random residuals, equal on ranks that encode the same data."""
    where, states = plan.topology_of(world_size), []
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for rank in range(world_size):
        feedback: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
        for kind, sizes in residual_sizes(plan, where, rank).items():
            for name, numel in sizes.items():
                # magnitudes differ between elements; ranks with the same part of a mean use the same seed
                generator = torch.Generator().manual_seed(seed + 1000 * rank * (kind == "worker") + KINDS.index(kind))
                tensor = torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)
                feedback[kind][name] = factors.setdefault(kind, {}).setdefault(name, tensor) if kind in "pq" else tensor
        states.append(state_of(feedback, plan, rank, world_size))
    return states


def state_of(feedback: dict[str, dict[str, torch.Tensor]], plan: Plan, rank: int, world_size: int) -> dict[str, Any]:
    head = {"step": 4, "rank": rank, "world_size": world_size, "plan": plan.to_json()}
    return head | {"units": [unit.key for unit in plan.units], "feedback": feedback}


def resharded(states: list[dict[str, Any]], plan: Plan, world_size: int, alone: bool = False) -> list[dict[str, Any]]:
    """The residuals that the ranks of another job take over, after their checks. The input is the state of every rank
    or, if ``alone``, the rank's own state."""
    where, found = plan.topology_of(world_size), []
    for rank in range(world_size):
        job = read_own(states[rank], rank, world_size) if alone else read_job(states)
        feedback = Feedback(Places.of(torch.device("cpu")))
        feedback.load_state_dict(reshard(job, plan, where, rank), residual_sizes(plan, where, rank))
        found.append({"feedback": feedback.state_dict()})
    return found


def owed(states: list[dict[str, Any]], plan: Plan) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For every unit: the part of its mean that is still owed, and the sum of magnitudes that bounds its rounding, in
    fp64.

    Only compressors with one state are allowed, whose residual elements are in the order of the unit's elements.
    """
    where, totals = plan.topology_of(len(states)), {}
    for unit in plan.units:
        total, magnitude = torch.zeros(2, unit.numel, dtype=torch.float64)
        for rank, state in enumerate(states):
            program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
            for kind, encoding in zip(
                ENCODINGS, encoded_regions(program, unit.numel, where, rank, unit.root), strict=False
            ):
                if unit.key in state["feedback"][kind]:
                    residual = state["feedback"][kind][unit.key].double()
                    total[encoding.start : encoding.stop] += encoding.weight * residual
                    magnitude[encoding.start : encoding.stop] += encoding.weight * residual.abs()
        totals[unit.key] = total, magnitude
    return totals


def check_kept(old: Plan, old_size: int, new: Plan, new_size: int, alone: bool = False) -> None:
    states = saved(old, old_size)
    before, after = owed(states, old), owed(resharded(states, new, new_size, alone), new)
    for key, (total, magnitude) in before.items():
        # only the resharded residual is rounded to fp32; sums in fp64 have at most some tens of terms
        assert ((after[key][0] - total).abs() <= EPS * magnitude * (1 + 2.0**-20)).all(), key
        assert total.numel() == 0 or total.any()
