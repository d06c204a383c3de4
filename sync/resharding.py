"""What a job of one size has saved, for a job of another size.

What the residuals of an encoding hold is what the mean has not been given yet. Added up over the ranks, each at its
place and times its weight (:func:`~.program.encodings`), it is one vector of the whole unit, the encoding's *mass*.
Raw data is always a mean: whatever the program, the weights of all ranks that encode an element add up to one. So a
rank of the new job keeps of the mass what it encodes, and the total stays what it was, to one rounding to fp32.

Decisions that are not obvious:

- Nobody gets the residual of one old rank. The data is dealt out anew, so it would mean nothing there; ranks that keep
  the same must get the same; and the mean has no larger a norm than what it is the mean of, on which bounds on the
  error of error feedback depend.
- A momentum is no mass, but an average of gradients that a rank has seen. Its mean over the ranks is the best guess of
  what a new rank would have, and keeps their mean, by which a velocity moves the parameters. A mean over the ranks is
  what the mass of a whole unit is, so states of both kinds are treated alike, each for itself.
- The default program depends on the number of ranks, a ring is made for one, a root may be another one. So a job
  saves its plan, and the old residuals are read with the old plan. What belongs to an encoding that the new program
  lacks is added to its first one: a mass fits everywhere. A momentum does not, and is left out there.
- All ranks work out the same from the same list, to the bit: in fp64, on the CPU, no two operations in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .feedback import ENCODINGS, KINDS, check_state
from .plan import Plan, UnitPlan
from .program import Encoding, encodings, trace
from .strategies import ENCODED_ALLREDUCE, POWERSGD
from .topology import Topology

Remembered = dict[str, dict[str, torch.Tensor]]
"""Of one rank: ``{kind: {unit: residual or factor}}``."""

_FACTORS = KINDS[len(ENCODINGS) :]


@dataclass(frozen=True)
class Job:
    """What all ranks of a job have saved, checked.

    Attributes:
        plan: of that job.
        topology: of its ranks.
        step: at which it was saved.
        feedback: of every rank.
    """

    plan: Plan
    topology: Topology
    step: int
    feedback: tuple[Remembered, ...]


# -------------------------------------------------------------------- what there is to remember


def kept(unit: UnitPlan, topology: Topology, rank: int) -> dict[str, Encoding]:
    """The encodings of a unit of which a rank keeps residuals, by kind: the same kinds on all ranks."""
    # the rounds of a low-rank method are of one encoding
    program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
    each = encodings(program, unit.numel, topology, rank, unit.root)
    return {kind: encoding for kind, encoding in zip(ENCODINGS, each, strict=False) if unit.remembers(kind)}


def residual_sizes(plan: Plan, topology: Topology, rank: int) -> dict[str, dict[str, int]]:
    """Elements of all that a rank can remember: of every encoding, and of factors."""
    sizes: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for unit in plan.units:
        for kind, encoding in kept(unit, topology, rank).items():
            sizes[kind][unit.key] = unit.encoder(kind).states * (encoding.stop - encoding.start)
        for kind, numel in unit.compressor.factor_sizes(unit.numel).items():
            sizes[kind][unit.key] = numel
    return sizes


# -------------------------------------------------------------------- what was saved


def check_header(state: Any) -> None:
    """Raise :class:`ValueError` unless ``state`` says of which step, rank, job and plan it is."""
    if not isinstance(state, dict):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    missing = [key for key in ("step", "rank", "world_size", "plan", "feedback") if key not in state]
    if missing:
        raise ValueError(f"state: missing {', '.join(missing)}")
    for key, smallest in (("step", 0), ("world_size", 1), ("rank", 0)):
        if type(state[key]) is not int or state[key] < smallest:
            raise ValueError(f"state: {key} must be an int from {smallest} up, got {state[key]!r}")
    if state["rank"] >= state["world_size"]:
        raise ValueError(f"state: of rank {state['rank']} of {state['world_size']}, which there is not")
    if not isinstance(state["plan"], dict):
        raise ValueError(f"state: plan must be a dict, got {type(state['plan']).__name__}")


def read_job(states: Sequence[Any]) -> Job:
    """A job from what its ranks have saved, in any order, each once.

    Raises:
        ValueError: one is missing, there twice or damaged, or they are not of the same step of the same job.
    """
    if not states:
        raise ValueError("states: the list is empty")
    by_rank: dict[int, dict[str, Any]] = {}
    for number, state in enumerate(states):
        try:
            check_header(state)
        except ValueError as error:
            raise ValueError(f"states: number {number}: {error}") from error
        if state["rank"] in by_rank:
            raise ValueError(f"states: rank {state['rank']} is there twice")
        by_rank[state["rank"]] = state
        for key in ("world_size", "step", "plan"):
            if state[key] != states[0][key]:
                shown = "" if key == "plan" else f": {states[0][key]} and {state[key]}"
                raise ValueError(f"states: ranks {states[0]['rank']} and {state['rank']} differ in their {key}{shown}")
    world_size = states[0]["world_size"]
    if len(states) < world_size:
        absent = next(rank for rank in range(world_size) if rank not in by_rank)
        raise ValueError(f"states: rank {absent} of {world_size} is missing")
    plan = Plan.from_json(states[0]["plan"])
    topology = plan.topology_of(world_size)
    _check_plan(plan, topology, world_size)
    for rank in range(world_size):
        try:
            check_state(by_rank[rank]["feedback"], residual_sizes(plan, topology, rank))
        except ValueError as error:
            raise ValueError(f"states: rank {rank}: {error}") from error
    feedback = tuple(by_rank[rank]["feedback"] for rank in range(world_size))
    _check_factors(feedback)
    return Job(plan, topology, states[0]["step"], feedback)


def _check_plan(plan: Plan, topology: Topology, world_size: int) -> None:
    if topology.world_size != world_size:
        raise ValueError(f"states: the plan is for {topology}, the job had {world_size} ranks")
    for unit in plan.units:
        if unit.root >= world_size:
            raise ValueError(f"states: {unit.key}: root is {unit.root}, the job had {world_size} ranks")
        try:
            trace(unit.program, unit.numel, torch.float32, unit.compressor, topology)
        except ValueError as error:
            raise ValueError(f"states: {unit.key}: {error}") from error


def _check_factors(feedback: Sequence[Remembered]) -> None:
    for kind in _FACTORS:
        first = feedback[0][kind]
        for rank, other in enumerate(feedback):
            for name in first.keys() | other[kind].keys():
                mine, theirs = first.get(name), other[kind].get(name)
                if mine is None or theirs is None or not torch.equal(mine.cpu(), theirs.cpu()):
                    raise ValueError(f"states: ranks 0 and {rank} differ in the factor {kind} of {name}")


# -------------------------------------------------------------------- for another job


def reshard(job: Job, plan: Plan, topology: Topology, rank: int) -> Remembered:
    """What rank ``rank`` of a job of another size takes over; its own, as it is, where nothing has changed.

    Args:
        job: the old one.
        plan: the new one: the same units with the same compressors; their programs and roots may differ.
        topology: of the new job.
        rank: of the new job.

    Raises:
        ValueError: the plans do not fit.
    """
    before = {unit.key: unit for unit in job.plan.units}
    _check_fit(before, {unit.key: unit for unit in plan.units})
    moved = [unit for unit in plan.units if _way(before[unit.key]) != _way(unit)]
    if not moved and job.topology == topology:
        return job.feedback[rank]
    found: Remembered = {kind: {} for kind in ENCODINGS} | {kind: job.feedback[0][kind] for kind in _FACTORS}
    for unit in plan.units:
        masses = _masses(job, before[unit.key])
        encoded = kept(unit, topology, rank)
        _gather_in_first(masses, before[unit.key], encoded)
        for kind, mass in masses.items():
            piece = mass[:, encoded[kind].start : encoded[kind].stop]
            found[kind][unit.key] = _joined(piece.float(), encoded[kind].size)
    return found


def _way(unit: UnitPlan) -> Any:
    return unit.program, unit.root


def _check_fit(before: dict[str, UnitPlan], after: dict[str, UnitPlan]) -> None:
    for key in [*before, *after]:
        if key not in after or key not in before:
            raise ValueError(f"states: {key} is a unit of {'that' if key in before else 'this'} plan only")
        old, new = before[key], after[key]
        for what, was, now in (
            ("elements", old.numel, new.numel),
            ("compressor", old.compressor.name, new.compressor.name),
            ("states", old.compressor.states, new.compressor.states),
            ("feedback", old.feedback, new.feedback),
        ):
            if was != now:
                raise ValueError(f"states: {key}: {what} of that plan: {was}, of this one: {now}")


def _masses(job: Job, unit: UnitPlan) -> dict[str, torch.Tensor]:
    """By kind of encoding, ``[states, numel]``, fp64; none of what no rank has kept anything of."""
    masses: dict[str, torch.Tensor] = {}
    for rank, feedback in enumerate(job.feedback):
        for kind, encoding in kept(unit, job.topology, rank).items():
            if (residual := feedback[kind].get(unit.key)) is None:
                continue
            states = unit.encoder(kind).states
            if kind not in masses:
                masses[kind] = torch.zeros(states, unit.numel, dtype=torch.float64)
            vectors = _parted(residual.detach().cpu(), states, encoding.size).double()
            masses[kind][:, encoding.start : encoding.stop] += vectors.mul_(encoding.weight)
    return masses


def _gather_in_first(masses: dict[str, torch.Tensor], unit: UnitPlan, encoded: dict[str, Encoding]) -> None:
    """Add the masses of encodings that there are no more to that of the first one, the state that is encoded."""
    first = ENCODINGS[0]
    for kind in [kind for kind in masses if kind not in encoded]:
        mass = masses.pop(kind)
        if first not in encoded:
            raise ValueError(f"states: {unit.key}: the residuals of that plan have no place in this one")
        if unit.encoder(kind).conserves:
            if first not in masses:
                masses[first] = mass.new_zeros(unit.encoder(first).states, unit.numel)
            masses[first][-1] += mass[-1]


def _parted(residual: torch.Tensor, states: int, size: int) -> torch.Tensor:
    """``[states, numel]`` of what lies one stretch of ``size`` elements after the other, all states of it together."""
    stretches = torch.split(residual, states * max(size, 1))
    return torch.cat([stretch.view(states, stretch.numel() // states) for stretch in stretches], dim=1)


def _joined(vectors: torch.Tensor, size: int) -> torch.Tensor:
    """The reverse of :func:`_parted`."""
    return torch.cat([stretch.flatten() for stretch in torch.split(vectors, max(size, 1), dim=1)])
