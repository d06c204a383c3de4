"""The saved states of a job's ranks, read and checked: nothing of them is taken over before all of it is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..plans.plan import Plan, UnitPlan
from ..programs.residuals import EncodedRegion
from ..programs.sizes import sizes_of
from ..programs.topology import Topology
from ..resources.feedback import ENCODINGS, KINDS, NOUNS
from ..resources.feedback import check_state as check_feedback
from .remembered import FACTORS, Remembered, kept, parted, residual_sizes

MOST_STEPS = 2**48
"""No training has had as many."""


@dataclass(frozen=True)
class Job:
    """The states that all ranks of a job have saved, or one of them, checked.

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

    @property
    def owes(self) -> bool:
        """Whether there is something that the mean has not been given yet."""
        each = (
            tensor for feedback in self.feedback.values() for kind in ENCODINGS for tensor in feedback[kind].values()
        )
        return any(bool(tensor.any()) for tensor in each)

    def sums(self, unit: UnitPlan) -> Iterator[tuple[str, EncodedRegion, torch.Tensor]]:
        """Residuals of a unit, each times its weight in the mean: the kind of its encoding, the encoding, and fp64
        numbers as a residual holds them. One for every rank, or for several together that encode the same elements."""
        for rank, feedback in self.feedback.items():
            for kind, encoding in kept(unit, self.topology, rank).items():
                if (residual := feedback[kind].get(unit.key)) is not None:
                    yield kind, encoding, residual.detach().cpu().double().mul_(encoding.weight)

    def masses(self, unit: UnitPlan) -> dict[str, torch.Tensor]:
        """The masses of a unit by kind of encoding, ``[states, numel]``, fp64; none of what no rank has kept."""
        masses: dict[str, torch.Tensor] = {}
        for kind, encoding, residual in self.sums(unit):
            states = unit.encoder(kind).states
            if kind not in masses:
                masses[kind] = torch.zeros(states, unit.numel, dtype=torch.float64)
            masses[kind][:, encoding.start : encoding.stop] += parted(residual, states, encoding.size)
        return masses


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
            _check_state(state)
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
    """The job of which one rank's state is given.

    Args:
        state: of that rank.
        rank, world_size: of the rank that takes it over.

    Raises:
        ValueError: damaged, or of another rank, or of a job of another size.
    """
    _check_state(state)
    if (state["rank"], state["world_size"]) != (rank, world_size):
        hint = "" if state["world_size"] == world_size else "; a list of the states of all its ranks can be loaded"
        raise ValueError(
            f"state: of rank {state['rank']} of {state['world_size']}, this is rank {rank} of {world_size}{hint}"
        )
    return _read({rank: state})


def read_header(state: Any) -> Job:
    """A job from what is the same on all of its ranks, without what they remember.

    Raises:
        ValueError: damaged.
    """
    _check_header(state)
    plan = Plan.from_json(state["plan"])
    topology = plan.topology_of(state["world_size"])
    _check_plan(plan, topology, state["world_size"])
    return Job(plan, topology, state["step"], frozenset(state["units"]), {})


def _check_header(state: Any) -> None:
    """Raise :class:`ValueError` unless ``state`` says of which step, job, plan and units it is."""
    _check_keys(state, ("step", "world_size", "plan", "units"))
    _check_int(state, "step", 0)
    _check_int(state, "world_size", 1)
    if not isinstance(state["plan"], dict):
        raise ValueError(f"state: plan must be a dict, got {type(state['plan']).__name__}")
    if not isinstance(state["units"], list) or not all(isinstance(key, str) for key in state["units"]):
        raise ValueError("state: units must be a list of names")


def _check_state(state: Any) -> None:
    """Raise :class:`ValueError` unless ``state`` has a header, the rank that it is of, and what that remembers."""
    _check_header(state)
    _check_keys(state, ("rank", "feedback"))
    _check_int(state, "rank", 0)
    if state["rank"] >= state["world_size"]:
        raise ValueError(f"state: of rank {state['rank']} of {state['world_size']}, which there is not")


def _check_keys(state: Any, keys: Sequence[str]) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(f"state: missing {', '.join(missing)}")


def _check_int(state: dict[str, Any], key: str, smallest: int) -> None:
    if type(state[key]) is not int or not smallest <= state[key] <= MOST_STEPS:
        raise ValueError(f"state: {key} must be an int from {smallest} to {MOST_STEPS}, got {state[key]!r}")


def _read(by_rank: Mapping[int, dict[str, Any]]) -> Job:
    job = read_header(next(iter(by_rank.values())))
    for rank, state in by_rank.items():
        try:
            sizes = residual_sizes(job.plan, job.topology, rank)
            check_feedback(state["feedback"], sizes)
            _check_units(state["units"], state["feedback"], sizes)
        except ValueError as error:
            raise ValueError(f"state of rank {rank}: {error}") from error
    units = frozenset(key for state in by_rank.values() for key in state["units"])
    return replace(job, units=units, feedback={rank: by_rank[rank]["feedback"] for rank in sorted(by_rank)})


def _check_plan(plan: Plan, topology: Topology, world_size: int) -> None:
    """Raise :class:`ValueError` unless a plan that was saved is one for so many ranks, with programs that work."""
    if topology.world_size != world_size:
        raise ValueError(f"state: the plan is for {topology}, the job had {world_size} ranks")
    for unit in plan.units:
        if unit.root >= world_size:
            raise ValueError(f"state: {unit.key}: root is {unit.root}, the job had {world_size} ranks")
        try:
            sizes_of(unit.program, unit.numel, torch.float32, unit.compressor, topology)
        except ValueError as error:
            raise ValueError(f"state: {unit.key}: {error}") from error


def _check_units(units: list[str], feedback: Remembered, sizes: dict[str, dict[str, int]]) -> None:
    """Raise :class:`ValueError` unless there is all that is kept of these units, and of no other."""
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
