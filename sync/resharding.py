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
- A rank that has its own state alone keeps its own part of the mass: what it encodes now, it divides by what that is
  worth in the mean. Where it encodes something else now, or the same as another rank, the others' states are needed.
- All ranks work out the same from the same list, to the bit: in fp64, on the CPU, no two operations in one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .feedback import ENCODINGS, KINDS, NOUNS, check_state
from .plan import Plan, UnitPlan
from .program import Encoding, encodings, trace
from .steps import Collective, Level
from .strategies import ENCODED_ALLREDUCE, POWERSGD
from .topology import Topology

Remembered = dict[str, dict[str, torch.Tensor]]
"""Of one rank: ``{kind: {unit: residual or factor}}``."""

FACTORS = KINDS[len(ENCODINGS) :]
MOST_STEPS = 2**48
"""No training has had as many."""


@dataclass(frozen=True)
class Job:
    """What all ranks of a job have saved, or one of them, checked.

    Attributes:
        plan: of that job.
        topology: of its ranks.
        step: at which it was saved.
        units: the keys of those of which something was kept.
        feedback: of every rank, or of one.
    """

    plan: Plan
    topology: Topology
    step: int
    units: frozenset[str]
    feedback: Mapping[int, Remembered]

    @property
    def is_whole(self) -> bool:
        """Whether this is what all ranks have saved."""
        return len(self.feedback) == self.topology.world_size


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
            _check_header(state)
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
    job = _read(by_rank)
    _check_factors(job.feedback)
    return job


def read_own(state: Any, rank: int, world_size: int) -> Job:
    """What one rank of a job has saved.

    Args:
        state: of that rank.
        rank, world_size: of the rank that takes it over.

    Raises:
        ValueError: damaged, or of another rank, or of a job of another size.
    """
    _check_header(state)
    if (state["rank"], state["world_size"]) != (rank, world_size):
        hint = "" if state["world_size"] == world_size else "; a list of the states of all its ranks can be loaded"
        raise ValueError(
            f"state: of rank {state['rank']} of {state['world_size']}, this is rank {rank} of {world_size}{hint}"
        )
    return _read({rank: state})


def _check_header(state: Any) -> None:
    """Raise :class:`ValueError` unless ``state`` says of which step, rank, job and plan it is."""
    if not isinstance(state, dict):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    missing = [key for key in ("step", "rank", "world_size", "plan", "units", "feedback") if key not in state]
    if missing:
        raise ValueError(f"state: missing {', '.join(missing)}")
    for key, smallest in (("step", 0), ("world_size", 1), ("rank", 0)):
        if type(state[key]) is not int or not smallest <= state[key] <= MOST_STEPS:
            raise ValueError(f"state: {key} must be an int from {smallest} to {MOST_STEPS}, got {state[key]!r}")
    if state["rank"] >= state["world_size"]:
        raise ValueError(f"state: of rank {state['rank']} of {state['world_size']}, which there is not")
    if not isinstance(state["plan"], dict):
        raise ValueError(f"state: plan must be a dict, got {type(state['plan']).__name__}")


def _read(by_rank: Mapping[int, dict[str, Any]]) -> Job:
    first = next(iter(by_rank.values()))
    world_size = first["world_size"]
    plan = Plan.from_json(first["plan"])
    topology = plan.topology_of(world_size)
    check_plan(plan, topology, world_size)
    for rank, state in by_rank.items():
        try:
            sizes = residual_sizes(plan, topology, rank)
            check_state(state["feedback"], sizes)
            _check_units(state["units"], state["feedback"], sizes)
        except ValueError as error:
            raise ValueError(f"state of rank {rank}: {error}") from error
    units = frozenset(key for state in by_rank.values() for key in state["units"])
    return Job(plan, topology, first["step"], units, {rank: by_rank[rank]["feedback"] for rank in sorted(by_rank)})


def check_plan(plan: Plan, topology: Topology, world_size: int) -> None:
    """Raise :class:`ValueError` unless a plan that was saved is one for so many ranks, with programs that work."""
    if topology.world_size != world_size:
        raise ValueError(f"state: the plan is for {topology}, the job had {world_size} ranks")
    for unit in plan.units:
        if unit.root >= world_size:
            raise ValueError(f"state: {unit.key}: root is {unit.root}, the job had {world_size} ranks")
        try:
            trace(unit.program, unit.numel, torch.float32, unit.compressor, topology)
        except ValueError as error:
            raise ValueError(f"state: {unit.key}: {error}") from error


def _check_units(units: Any, feedback: Remembered, sizes: dict[str, dict[str, int]]) -> None:
    """Raise :class:`ValueError` unless there is all that is kept of these units, and of no other."""
    if not isinstance(units, list) or not all(isinstance(key, str) for key in units):
        raise ValueError("units must be a list of names")
    for kind in KINDS:
        for key in sorted(sizes[kind].keys() & set(units)):
            if sizes[kind][key] and key not in feedback[kind]:
                raise ValueError(f"feedback: the {NOUNS[kind]} of {key} is missing")
        for key in sorted(feedback[kind].keys() - set(units)):
            raise ValueError(f"feedback: there is a {NOUNS[kind]} of {key}, which is not among its units")


def _check_factors(feedback: Mapping[int, Remembered]) -> None:
    for kind in FACTORS:
        first = feedback[0][kind]
        for rank, other in feedback.items():
            for name in first.keys() | other[kind].keys():
                mine, theirs = first.get(name), other[kind].get(name)
                if mine is None or theirs is None or not torch.equal(mine.cpu(), theirs.cpu()):
                    raise ValueError(f"states: ranks 0 and {rank} differ in the factor {kind} of {name}")


# -------------------------------------------------------------------- for another job


def reshard(job: Job, plan: Plan, topology: Topology, rank: int) -> Remembered:
    """What a rank takes over of a job: of units that go the same way as before its own, as it is.

    Args:
        job: the old one, of another size, or with other programs. If it is what one rank has saved, that rank.
        plan: the new one: the same units with the same compressors; their programs and roots may differ.
        topology: of the new job.
        rank: of the new job.

    Raises:
        ValueError: the plans do not fit, or the states of other ranks would be needed.
    """
    before = {unit.key: unit for unit in job.plan.units}
    _check_fit(before, {unit.key: unit for unit in plan.units})
    found: Remembered = {kind: {} for kind in KINDS}
    for unit in plan.units:
        old = before[unit.key]
        stays = way(old, job.topology) == way(unit, topology)
        own = job.feedback[rank] if stays else next(iter(job.feedback.values()))  # factors are the same on all ranks
        for kind in KINDS if stays else FACTORS:
            if unit.key in own[kind]:
                found[kind][unit.key] = own[kind][unit.key]
        if not stays:
            for kind, residual in _handed_on(job, old, unit, topology, rank).items():
                found[kind][unit.key] = residual
    return found


def way(unit: UnitPlan, topology: Topology) -> Any:
    """Equal where all ranks encode the same of a unit, in the same order."""
    levels = {step.level for step in unit.program if isinstance(step, Collective)}
    return unit.program, unit.root, topology.world_size if levels <= {Level.FLAT} else topology


def _handed_on(job: Job, old: UnitPlan, unit: UnitPlan, topology: Topology, rank: int) -> dict[str, torch.Tensor]:
    """The residuals of a unit, by kind, that give the mean what those of the old job would have given it."""
    masses, encoded = _masses(job, old), kept(unit, topology, rank)
    if job.is_whole:
        homeless = {kind for kind in masses if kind not in encoded}
        shares = dict.fromkeys(encoded, 1.0)
    else:
        pieces = kept(old, job.topology, rank)
        homeless = {kind for kind in masses if not _has_room(encoded.get(kind), pieces[kind])}
        shares = {kind: encoding.weight for kind, encoding in encoded.items()}
        if homeless and not all(_has_room(encoded.get(ENCODINGS[0]), pieces[kind]) for kind in homeless):
            raise ValueError(
                f"state: {unit.key}: this rank's residuals have no place in its program now; a list of the states of "
                "all ranks can be loaded"
            )
    _gather_in_first(masses, old, homeless, encoded)
    return {
        kind: _joined((mass[:, encoded[kind].start : encoded[kind].stop] / shares[kind]).float(), encoded[kind].size)
        for kind, mass in masses.items()
    }


def _has_room(encoding: Encoding | None, piece: Encoding) -> bool:
    """Whether a rank can keep by itself, in the residual of ``encoding``, what was kept of ``piece``."""
    if encoding is None or encoding.copies > 1:
        return False
    return piece.start >= piece.stop or (encoding.start <= piece.start and piece.stop <= encoding.stop)


def _check_fit(before: dict[str, UnitPlan], after: dict[str, UnitPlan]) -> None:
    for key in [*before, *after]:
        if key not in after or key not in before:
            raise ValueError(f"state: {key} is a unit of {'that' if key in before else 'this'} plan only")
        old, new = before[key], after[key]
        for what, was, now in (
            ("elements", old.numel, new.numel),
            ("compressor", old.compressor.name, new.compressor.name),
            ("states", old.compressor.states, new.compressor.states),
            ("feedback", old.feedback, new.feedback),
        ):
            if was != now:
                raise ValueError(f"state: {key}: {what} of that plan: {was}, of this one: {now}")


def _masses(job: Job, unit: UnitPlan) -> dict[str, torch.Tensor]:
    """By kind of encoding, ``[states, numel]``, fp64; none of what no rank has kept anything of."""
    masses: dict[str, torch.Tensor] = {}
    for rank, feedback in job.feedback.items():
        for kind, encoding in kept(unit, job.topology, rank).items():
            if (residual := feedback[kind].get(unit.key)) is None:
                continue
            states = unit.encoder(kind).states
            if kind not in masses:
                masses[kind] = torch.zeros(states, unit.numel, dtype=torch.float64)
            vectors = _parted(residual.detach().cpu(), states, encoding.size).double()
            masses[kind][:, encoding.start : encoding.stop] += vectors.mul_(encoding.weight)
    return masses


def _gather_in_first(
    masses: dict[str, torch.Tensor], unit: UnitPlan, homeless: Collection[str], encoded: Mapping[str, Encoding]
) -> None:
    """Add the masses of encodings that cannot have them any more to that of the first, the state that is encoded."""
    first = ENCODINGS[0]
    for kind in sorted(homeless):
        mass = masses.pop(kind)
        if first not in encoded:
            raise ValueError(f"state: {unit.key}: the residuals of that plan have no place in this one")
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
