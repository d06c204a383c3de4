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
        ValueError: as :func:`~.jobs.read_job`; or a part is damaged or missing, or has elements that are not together.
    """
    jobs = _jobs(states)
    if len(jobs) == (1 if part is None else part.count):
        return jobs[0 if part is None else part.index]
    whole = _joined(jobs) if len(jobs) > 1 else jobs[0]
    if part is None:
        return whole
    if part.starts is None:
        raise ValueError(
            "states: the shards of this model are along another dimension than the first; only a job with as "
            "many shards can be continued"
        )
    return _cut(whole, plan, part.starts)


def _jobs(states: Sequence[Any]) -> list[Job]:
    """The jobs of all parts in their order; a single one if ranks have whole parameters."""
    by_part: dict[int, list[Any]] = {}
    first_count = 1
    for number, state in enumerate(states):
        try:
            index, count = _part_of(state)
        except ValueError as error:
            raise ValueError(f"states[{number}]: {error}") from None
        if number == 0:
            first_count = count
        if count != first_count:
            raise ValueError(
                f"states: states[0] and states[{number}] differ in the count of parts: {first_count} and {count}"
            )
        by_part.setdefault(index, []).append(state)
    if first_count == 1:
        return [read_job(states)]
    jobs = []
    for index in range(first_count):
        if index not in by_part:
            raise ValueError(f"states: the states of part {index} of {first_count} are missing")
        try:
            jobs.append(read_job(by_part[index]))
        except ValueError as error:
            raise ValueError(f"part {index} of {first_count}: {error}") from error
        if jobs[index].step != jobs[0].step:
            raise ValueError(f"states: the parts are not of one step: {jobs[0].step} and {jobs[index].step}")
        if _described(jobs[index].plan) != _described(jobs[0].plan):
            raise ValueError(f"states: parts 0 and {index} differ in units, their feedback or compressors")
    return jobs


def _part_of(state: Any) -> tuple[int, int]:
    """The number of the part of a state, and the count of parts."""
    if not isinstance(state, dict):
        raise ValueError(f"expected a dict, got {type(state).__name__}")
    match state.get("part", [0, 1]):
        case [int(index), int(count)] if type(index) is type(count) is int and 0 <= index < count:
            return index, count
        case other:
            raise ValueError(f"part must be two ints, a number and the count of parts, got {other!r}")


def _described(plan: Plan) -> list[tuple[Any, ...]]:
    """The entries of units that are the same in the plans of all parts."""
    return [
        (unit.key, unit.compressor.name, unit.compressor.traits.states, unit.feedback, unit.in_place)
        for unit in plan.units
    ]


def _joined(jobs: Sequence[Job]) -> Job:
    """The job of one rank with everything that the jobs of all parts hold."""
    first = jobs[0]
    units, masses = [], dict[str, torch.Tensor]()
    for unit in first.plan.units:
        pieces = [job.plan.by_key[unit.key] for job in jobs]
        units.append(_alone(unit, sum(piece.numel for piece in pieces)))
        held = [_mass(job, piece) for job, piece in zip(jobs, pieces, strict=True)]
        if any(mass is not None for mass in held):
            states_of = unit.encoder(_FIRST).traits.states
            empty = (torch.zeros(states_of, piece.numel, dtype=torch.float64, device="cpu") for piece in pieces)
            each = (none if mass is None else mass for mass, none in zip(held, empty, strict=True))
            masses[unit.key] = torch.cat(list(each), dim=1)
    names = {name for job in jobs for name in job.parked_sizes}
    parked = {name: torch.cat([_parked(job, name) for job in jobs]) for name in names}
    return _job(first, units, masses, parked)


def _cut(job: Job, plan: Plan, starts: Mapping[str, int]) -> Job:
    """The job of one rank with the part of another job that a rank has."""
    units, masses = [], dict[str, torch.Tensor]()
    for unit in plan.units:
        if (old := job.plan.by_key.get(unit.key)) is None:
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


def _parked(job: Job, name: str) -> torch.Tensor:
    """The mean of what is parked of a parameter, or zeros."""
    numel = sum(unit.numel for unit in job.plan.units if unit.parameter == name)
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
