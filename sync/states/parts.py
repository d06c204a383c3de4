"""Jobs of ranks that have only parts of the parameters, such as replicas of shards: one job for each part.

Residuals of a part are those of its elements. To continue with other parts, or with none, the masses of the parts
(:mod:`.resharding`) are put one after the other, or cut, and given to a job of a single rank. From there they go to the
ranks of the new job like those of any other job. Factors of low-rank methods are of a part's own matrix and are lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from gckernels.codec import Codec

from ..plans.plan import Plan, UnitPlan
from ..programs.named import ALLGATHER, default_program
from ..programs.residuals import ENCODINGS
from ..programs.topology import Topology
from ..resources.feedback import KINDS
from .jobs import Job, read_job, read_own
from .layout import RankState, join_states
from .resharding import add_to_first

_FIRST = ENCODINGS[0]
Rows: TypeAlias = Mapping[str, int]
"""The number of elements of each stretch of a parameter, by name."""


@dataclass(frozen=True)
class ModelPart:
    """The part of every parameter that a rank has."""

    index: int  # the number of the part
    count: int  # the number of parts
    starts: Mapping[str, int] | None = None
    """The first element of the part in each parameter, by name; ``None`` if its elements are not together."""
    rows: Mapping[str, int] | None = None
    """The number of elements of each stretch of a parameter, by name, if the part has the stretches ``index``, ``index
    + count``, ``index + 2 * count`` and so on."""

    @property
    def entry(self) -> list[Any]:
        """The entry of the part in a saved state."""
        return [self.index, self.count, *([] if self.rows is None else [dict(self.rows)])]

    def cut(self, name: str, values: torch.Tensor, numel: int) -> torch.Tensor:
        """The part of the values of a parameter, ``[..., numel]``.

        Args:
            name: the name of the parameter.
            values: the values of all its elements, along the last dimension.
            numel: the number of elements of the part.
        """
        if self.rows is not None:
            return torch.cat([*_stretches(values, self.rows[name])[self.index :: self.count], values[..., :0]], -1)
        assert self.starts is not None
        return values[..., self.starts[name] : self.starts[name] + numel]


def read_states(states: Sequence[Any], plan: Plan, part: ModelPart | None) -> Job:
    """A job, from the states of all its ranks, as a rank continues it.

    Args:
        states: one state for each rank of the job, in any order.
        plan: the plan of the rank, whose units are the parts that it has.
        part: the part of the parameters that it has; ``None`` for all of them.

    Raises:
        ValueError: as :func:`~.jobs.read_job`; or a part is damaged or missing, or has elements that are not together.
    """
    jobs, rows = _jobs(states)
    if len(jobs) == (1 if part is None else part.count) and rows == (None if part is None else part.rows):
        return jobs[0 if part is None else part.index]
    whole = _joined(jobs, rows) if len(jobs) > 1 else jobs[0]
    if part is None:
        return whole
    if part.starts is None and part.rows is None:
        raise ValueError(
            "states: the shards of this model are along another dimension than the first; only a job with as "
            "many shards can be continued"
        )
    return _cut(whole, plan, part)


def read_state(state: Any, part: ModelPart | None, rank: int, world_size: int) -> Job:
    """A job, from the state of one of its ranks, as the same rank continues it.

    Args:
        state: what that rank has saved.
        part: the part of the parameters that the rank has; ``None`` for all of them.
        rank, world_size: the rank, and the number of ranks of its job.

    Raises:
        ValueError: as :func:`~.jobs.read_own`; or the state is of another part.
    """
    entry = None if part is None else part.entry
    if isinstance(state, dict) and state.get("part") != entry:
        raise ValueError(
            f"state: saved by a rank with part {state.get('part')} of the parameters, but this rank has {entry}; "
            "pass the list of the states of all its ranks instead"
        )
    return read_own(state, rank, world_size)


def _jobs(states: Sequence[Any]) -> tuple[list[Job], Rows | None]:
    """The jobs of all parts in their order, a single one if ranks have whole parameters; and the elements of stretches,
    if parts have several."""
    by_part: dict[int, list[Any]] = {}
    first_count, first_rows = 1, None
    for number, state in enumerate(states):
        try:
            index, count, rows = _part_of(state)
        except ValueError as error:
            raise ValueError(f"states[{number}]: {error}") from None
        if number == 0:
            first_count, first_rows = count, rows
        if rows != first_rows:
            raise ValueError(f"states: states[0] and states[{number}] differ in the stretches of parts")
        if count != first_count:
            raise ValueError(
                f"states: states[0] and states[{number}] differ in the count of parts: {first_count} and {count}"
            )
        by_part.setdefault(index, []).append(state)
    if first_count == 1:
        return [read_job(states)], None
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
    return jobs, first_rows


def _part_of(state: Any) -> tuple[int, int, Rows | None]:
    """The number of the part of a state, the count of parts, and the elements of stretches, if it has several."""
    if not isinstance(state, dict):
        raise ValueError(f"expected a dict, got {type(state).__name__}")
    match state.get("part", [0, 1]):
        case [int(index), int(count), *rest] if type(index) is type(count) is int and 0 <= index < count:
            match rest:
                case []:
                    return index, count, None
                case [dict(rows)] if all(type(row) is int and row >= 0 for row in rows.values()):
                    return index, count, rows
    raise ValueError(
        "part must be two ints, a number and the count of parts, and for parts in stretches a dict of ints, got "
        f"{state['part']!r}"
    )


def _described(plan: Plan) -> list[tuple[Any, ...]]:
    """The entries of units that are the same in the plans of all parts."""
    return [
        (unit.key, unit.compressor.name, unit.compressor.traits.states, unit.feedback, unit.in_place)
        for unit in plan.units
    ]


def _merged(name: str, pieces: Sequence[torch.Tensor], rows: Rows | None) -> torch.Tensor:
    """The values of a parameter, of which ``pieces`` are those of all parts, along the last dimension."""
    if rows is None:
        return torch.cat([*pieces], -1)
    stretches = itertools.zip_longest(*(_stretches(piece, rows[name]) for piece in pieces))
    return torch.cat([each for together in stretches for each in together if each is not None], -1)


def _stretches(values: torch.Tensor, row: int) -> Sequence[torch.Tensor]:
    """Stretches of ``row`` elements along the last dimension, the last of which may be shorter."""
    found: Sequence[torch.Tensor] = torch.split(values, max(row, 1), -1)
    return found


def _joined(jobs: Sequence[Job], rows: Rows | None) -> Job:
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
            masses[unit.key] = _merged(unit.parameter, [*each], rows)
    names = {name for job in jobs for name in job.parked_sizes}
    parked = {name: _merged(name, [_parked(job, name) for job in jobs], rows) for name in names}
    return _job(first, units, masses, parked)


def _cut(job: Job, plan: Plan, part: ModelPart) -> Job:
    """The job of one rank with the part of another job that a rank has."""
    units, masses = [], dict[str, torch.Tensor]()
    for unit in plan.units:
        if (old := job.plan.by_key.get(unit.key)) is None:
            continue  # which is refused later
        units.append(_alone(old, unit.numel))
        if (mass := _mass(job, old)) is not None:
            masses[unit.key] = part.cut(unit.parameter, mass, unit.numel)
    numels = {unit.parameter: unit.numel for unit in plan.units}
    means = job.parked_part(0, 0)
    parked = {name: part.cut(name, mean, numels[name]) for name, mean in means.items()}
    return _job(job, units, masses, parked)


def _alone(unit: UnitPlan, numel: int) -> UnitPlan:
    """The unit in a job of one rank, which encodes it as a whole."""
    program = ALLGATHER if isinstance(unit.compressor, Codec) else default_program(unit.compressor, 1)
    return replace(unit, numel=numel, program=unit.program if unit.in_place else program, root=0)


def _mass(job: Job, unit: UnitPlan) -> torch.Tensor | None:
    """The mass of a unit, ``[states, numel]`` in fp64, all of it in the first encoding; ``None`` if there is
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
