"""Jobs of ranks that have only parts of the parameters, such as replicas of shards: one job for each part.

Residuals of a part are those of its elements. To continue with other parts, or with none, the masses of the parts
(:mod:`.resharding`) are put one after the other, or cut, and given to a job of a single rank. From there they go to the
ranks of the new job like those of any other job. Factors of low-rank methods are of a part's own matrix and are lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gckernels.codec import Codec

from ..plans.plan import Plan, UnitPlan
from ..programs.named import ALLGATHER, default_program
from ..programs.residuals import ENCODINGS
from ..programs.topology import Topology
from ..resources.feedback import KINDS
from .jobs import Job, read_job
from .layout import RankState, join_states
from .resharding import add_to_first

_FIRST = ENCODINGS[0]


@dataclass(frozen=True)
class ModelPart:
    """The part of every parameter that a rank has.

    Attributes:
        index: the number of the part.
        count: the number of parts.
        starts: the first element of the part in each parameter, by name; ``None`` if its elements are not together.
    """

    index: int
    count: int
    starts: Mapping[str, int] | None

    @property
    def entry(self) -> list[int]:
        """The entry of the part in a saved state."""
        return [self.index, self.count]


def read_states(states: Sequence[Any], plan: Plan, part: ModelPart | None) -> Job:
    """A job, from the states of all its ranks, as a rank continues it.

    Args:
        states: one state for each rank of the job, in any order.
        plan: the plan of the rank, whose units are the parts that it has.
        part: the part of the parameters that it has; ``None`` for all of them.

    Raises:
        ValueError: as :func:`~.jobs.read_job`; or a part is missing, or has elements that are not together.
    """
    saved = {tuple(each) for state in states if isinstance(state, dict) and (each := state.get("part")) is not None}
    if part is not None and saved and all(count == part.count for _, count in saved):
        return read_job([state for state in states if state.get("part") == part.entry])
    whole = _joined(states) if saved else read_job(states)
    if part is None:
        return whole
    if part.starts is None:
        raise ValueError(
            "states: the shards of this model are along another dimension than the first; only a job with as "
            "many shards can be continued"
        )
    return _cut(whole, plan, part.starts)


def _joined(states: Sequence[Any]) -> Job:
    """The job of one rank with everything that the jobs of all parts hold."""
    by_part: dict[int, list[Any]] = {}
    counts = {tuple(state.get("part", (0, 0)))[1] for state in states}
    for state in states:
        by_part.setdefault(state.get("part", (0, 0))[0], []).append(state)
    (count, *others) = counts
    if others or len(by_part) < count:
        raise ValueError(f"states: the states of {len(by_part)} parts are given, the job had {max(counts)}")
    jobs = [read_job(by_part[index]) for index in sorted(by_part)]
    first = jobs[0]
    if any(job.step != first.step for job in jobs):
        raise ValueError("states: the parts are not of one step")
    by_key = [{unit.key: unit for unit in job.plan.units} for job in jobs]
    units, masses = [], dict[str, torch.Tensor]()
    for unit in first.plan.units:
        pieces = [found[unit.key] for found in by_key]
        units.append(_alone(unit, sum(piece.numel for piece in pieces)))
        held = [_mass(job, piece) for job, piece in zip(jobs, pieces, strict=True)]
        if any(mass is not None for mass in held):
            states_of = unit.encoder(_FIRST).traits.states
            empty = (torch.zeros(states_of, piece.numel, dtype=torch.float64, device="cpu") for piece in pieces)
            each = (none if mass is None else mass for mass, none in zip(held, empty, strict=True))
            masses[unit.key] = torch.cat(list(each), dim=1)
    names = {name for job in jobs for name in job.parked_sizes}
    parked = {
        name: torch.cat([_parked(job, name, piece) for job, piece in zip(jobs, by_key, strict=True)]) for name in names
    }
    return _job(first, units, masses, parked)


def _cut(job: Job, plan: Plan, starts: Mapping[str, int]) -> Job:
    """The job of one rank with the part of another job that a rank has."""
    before = {unit.key: unit for unit in job.plan.units}
    units, masses = [], dict[str, torch.Tensor]()
    for unit in plan.units:
        if (old := before.get(unit.key)) is None:
            continue  # which is refused later
        start = starts[unit.parameter]
        units.append(_alone(old, unit.numel))
        if (mass := _mass(job, old)) is not None:
            masses[unit.key] = mass[:, start : start + unit.numel]
    numels = {unit.parameter: unit.numel for unit in plan.units}
    means = job.parked_part(0, 0)
    parked = {name: mean[starts[name] : starts[name] + numels[name]] for name, mean in means.items()}
    return _job(job, units, masses, parked)


def _alone(unit: UnitPlan, numel: int) -> UnitPlan:
    """The unit in a job of one rank, which encodes it as a whole."""
    program = ALLGATHER if isinstance(unit.compressor, Codec) else default_program(unit.compressor, 1)
    return replace(unit, numel=numel, program=unit.program if unit.in_place else program, root=0)


def _mass(job: Job, unit: UnitPlan) -> torch.Tensor | None:
    """The mass of a unit, ``[states, numel]`` in fp64, all of it as that of the first encoding; ``None`` if there is
    none."""
    masses = job.masses(unit)
    add_to_first(masses, unit, masses.keys() - {_FIRST}, [_FIRST] if unit.has_residual(_FIRST) else [])
    return masses.get(_FIRST)


def _parked(job: Job, name: str, units: Mapping[str, UnitPlan]) -> torch.Tensor:
    """The mean of what is parked of a parameter, or zeros."""
    numel = sum(unit.numel for unit in units.values() if unit.parameter == name)
    found = job.parked_part(0, 0).get(name)
    return torch.zeros(numel, dtype=torch.float32, device="cpu") if found is None else found


def _job(
    job: Job, units: Sequence[UnitPlan], masses: Mapping[str, torch.Tensor], parked: Mapping[str, torch.Tensor]
) -> Job:
    plan = replace(job.plan, units=tuple(units), topology=None, frontend=None, prediction=None)
    residuals = {key: join_states(mass.float(), mass.shape[1]) for key, mass in masses.items()}
    feedback: RankState = {kind: {} for kind in KINDS} | {_FIRST: residuals}
    sizes = {name: part.numel() for name, part in parked.items()}
    return replace(
        job, plan=plan, topology=Topology(1), feedback={0: feedback}, parked={0: dict(parked)}, parked_sizes=sizes
    )
