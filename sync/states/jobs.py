"""Reading and checking the saved states of a job's ranks. All are checked before anything is taken over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..plans.plan import Plan, UnitPlan
from ..programs.residuals import ENCODINGS, EncodedRegion
from ..programs.sizes import sizes_of
from ..programs.topology import Topology
from ..resources.feedback import KINDS, NOUNS
from ..resources.feedback import check_state as check_feedback
from .layout import FACTORS, RankState, kept_regions, max_sizes, residual_sizes, split_states

MAX_STEPS = 2**48
"""Upper bound of the integers in a state; no training has as many steps."""
AVERAGED = "averaged"
"""The name of a text in states: what the training averages, if that is not gradients."""
NOTES = ("journal", "tuning", AVERAGED)
"""The names of texts that a state may have beside what residuals need: figures of the training, and its tuning."""


@dataclass(frozen=True)
class Job:
    """Checked states that the ranks of a job have saved: of all ranks, of one, or only their header."""

    plan: Plan  # the plan of the job
    topology: Topology  # the topology of its ranks
    step: int  # the training step at which it was saved
    units: frozenset[str]  # keys of the units that have been compressed
    feedback: Mapping[int, RankState]  # residuals and factors by rank; of all ranks, of one, or of none
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """The texts among :data:`NOTES` that were saved, of the first rank that is there."""
    parked: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict, kw_only=True)
    """By rank and parameter, the parts of gradient that plans before have left behind."""
    parked_sizes: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    """The number of elements of each of these parameters."""

    @property
    def is_whole(self) -> bool:
        """Whether ``feedback`` has all ranks."""
        return len(self.feedback) == self.topology.world_size

    @property
    def has_unsent(self) -> bool:
        """Whether some residual is not zero, so that a part of the gradients is still to be sent."""
        each = (
            tensor for feedback in self.feedback.values() for kind in ENCODINGS for tensor in feedback[kind].values()
        )
        return any(bool(tensor.any()) for tensor in each)

    def parked_part(self, rank: int, world_size: int) -> dict[str, torch.Tensor]:
        """The parked gradient that one rank of the new job takes over, by parameter.

        Parts are means over the ranks, so each rank of a job of another size takes the mean of the old parts.

        Args:
            world_size: the number of ranks of the new job.
        """
        if world_size == self.topology.world_size:
            return dict(self.parked[rank])
        means = {
            name: torch.zeros(numel, dtype=torch.float64, device="cpu") for name, numel in self.parked_sizes.items()
        }
        for parts in self.parked.values():
            for name, part in parts.items():
                means[name] += part.detach().cpu().double() / len(self.parked)
        return {name: mean.float() for name, mean in means.items()}

    def largest_residuals(self) -> Iterator[tuple[UnitPlan, str, int]]:
        """The size of the largest residual on any rank, for every encoding of every unit that has been compressed.

        Yields:
            Unit, kind of the encoding, number of elements.
        """
        for unit in self.plan.units:
            if unit.key in self.units:
                for kind, width in max_sizes(unit, self.topology).items():
                    yield unit, kind, width

    def factors(self) -> Iterator[tuple[str, str, int]]:
        """Kind, unit and number of elements of each factor."""
        for unit in self.plan.units:
            if unit.key in self.units:
                for kind, numel in unit.compressor.factor_sizes(unit.numel).items():
                    yield kind, unit.key, numel

    def weighted_residuals(self, unit: UnitPlan) -> Iterator[tuple[str, EncodedRegion, torch.Tensor]]:
        """The residuals of a unit, each multiplied by its weight in the mean.

        Yields:
            The kind of the encoding, the encoding, and the residual in fp64, laid out as it was. Ranks that encode the
            same elements may share one item, which is their sum.
        """
        for rank, feedback in self.feedback.items():
            for kind, encoding in kept_regions(unit, self.topology, rank).items():
                if (residual := feedback[kind].get(unit.key)) is not None:
                    yield kind, encoding, residual.detach().cpu().double().mul_(encoding.weight)

    def masses(self, unit: UnitPlan) -> dict[str, torch.Tensor]:
        """The masses of a unit (see :mod:`.resharding`) by kind, ``[states, numel]`` in fp64.

        Kinds of which no rank has a residual are left out.
        """
        masses: dict[str, torch.Tensor] = {}
        for kind, encoding, residual in self.weighted_residuals(unit):
            states = unit.encoder(kind).traits.states
            if kind not in masses:
                masses[kind] = torch.zeros(states, unit.numel, dtype=torch.float64, device="cpu")
            masses[kind][:, encoding.start : encoding.stop] += split_states(residual, states, encoding.size)
        return masses


def read_job(states: Sequence[Any]) -> Job:
    """A job, from the states that all of its ranks have saved.

    Args:
        states: one state per rank, in any order.

    Raises:
        ValueError: a state is missing, damaged or present twice, or the states are not of one step of one job.
    """
    if not states:
        raise ValueError("states: the list is empty")
    by_rank: dict[int, dict[str, Any]] = {}
    for number, state in enumerate(states):
        try:
            _check_state(state)
        except ValueError as error:
            raise ValueError(f"states[{number}]: {error}") from error
        if state["rank"] in by_rank:
            raise ValueError(f"states: there are two states of rank {state['rank']}")
        by_rank[state["rank"]] = state
        for key in ("world_size", "step", "plan"):
            if state[key] != states[0][key]:
                values = "" if key == "plan" else f": {states[0][key]} and {state[key]}"
                raise ValueError(f"states: ranks {states[0]['rank']} and {state['rank']} differ in {key}{values}")
    world_size = states[0]["world_size"]
    if len(states) < world_size:
        absent = next(rank for rank in range(world_size) if rank not in by_rank)
        raise ValueError(f"states: the state of rank {absent} of {world_size} is missing")
    job = _read(by_rank)
    _check_factors(job.feedback)
    return job


def read_own(state: Any, rank: int, world_size: int) -> Job:
    """A job, from the state of one of its ranks.

    Args:
        state: what that rank has saved.
        rank: the rank that takes the state over.
        world_size: number of ranks of its job.

    Raises:
        ValueError: the state is damaged, or of another rank, or of a job with another number of ranks.
    """
    _check_state(state)
    if (state["rank"], state["world_size"]) != (rank, world_size):
        hint = "" if state["world_size"] == world_size else "; pass the list of the states of all its ranks instead"
        raise ValueError(
            f"state: saved by rank {state['rank']} of {state['world_size']}, but this is rank {rank} of "
            f"{world_size}{hint}"
        )
    return _read({rank: state})


def read_header(state: Any) -> Job:
    """A job without residuals and factors, from the entries of a state that are the same on all ranks.

    Raises:
        ValueError: the state is damaged.
    """
    _check_header(state)
    plan = Plan.from_json(state["plan"])
    topology = plan.topology_of(state["world_size"])
    _check_plan(plan, topology, state["world_size"])
    notes = {name: state[name] for name in NOTES if name in state}
    return Job(plan, topology, state["step"], frozenset(state["units"]), {}, notes=notes)


def _check_header(state: Any) -> None:
    """Raise :class:`ValueError` unless ``state`` has a valid step, world size, plan and list of units."""
    _check_keys(state, ("step", "world_size", "plan", "units"))
    _check_int(state, "step", 0)
    _check_int(state, "world_size", 1)
    if not isinstance(state["plan"], dict):
        raise ValueError(f"state: plan must be a dict, got {type(state['plan']).__name__}")
    if not isinstance(state["units"], list) or not all(isinstance(key, str) for key in state["units"]):
        raise ValueError("state: units must be a list of names")
    for name in NOTES:
        if not isinstance(state.get(name, ""), str):
            raise ValueError(f"state: {name} must be a text, got {type(state[name]).__name__}")


def _check_state(state: Any) -> None:
    """Raise :class:`ValueError` unless ``state`` has a valid header, a rank, and an entry ``feedback``."""
    _check_header(state)
    _check_keys(state, ("rank", "feedback"))
    _check_int(state, "rank", 0)
    if state["rank"] >= state["world_size"]:
        raise ValueError(f"state: rank must be less than world_size {state['world_size']}, got {state['rank']}")


def _check_keys(state: Any, keys: Sequence[str]) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(f"state: {', '.join(missing)} missing")


def _check_int(state: dict[str, Any], key: str, minimum: int) -> None:
    if type(state[key]) is not int or not minimum <= state[key] <= MAX_STEPS:
        raise ValueError(f"state: {key} must be an int from {minimum} to {MAX_STEPS}, got {state[key]!r}")


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
    ranks = sorted(by_rank)
    parked = {rank: by_rank[rank].get("parked", {}) for rank in ranks}
    parked_sizes: dict[str, int] = {}
    for rank, parts in parked.items():
        try:
            check_feedback({kind: {} for kind in KINDS} | {ENCODINGS[0]: parts})
        except ValueError as error:
            raise ValueError(f"state of rank {rank}: parked: {error}") from error
        for name, part in parts.items():
            if parked_sizes.setdefault(name, part.numel()) != part.numel():
                raise ValueError(
                    f"states: the parked parts of {name} have {parked_sizes[name]} and {part.numel()} elements"
                )
    feedback = {rank: by_rank[rank]["feedback"] for rank in ranks}
    return replace(job, units=units, feedback=feedback, parked=parked, parked_sizes=parked_sizes)


def _check_plan(plan: Plan, topology: Topology, world_size: int) -> None:
    """Raise :class:`ValueError` unless a saved plan has valid programs and is for ``world_size`` ranks."""
    if topology.world_size != world_size:
        raise ValueError(f"state: the plan is for {topology}, but the job had {world_size} ranks")
    for unit in plan.units:
        if unit.root >= world_size:
            raise ValueError(f"state: {unit.key}: root is {unit.root}, but the job had {world_size} ranks")
        try:
            sizes_of(unit.program, unit.numel, torch.float32, unit.compressor, topology, plan.span)
        except ValueError as error:
            raise ValueError(f"state: {unit.key}: {error}") from error


def _check_units(units: list[str], feedback: RankState, sizes: dict[str, dict[str, int]]) -> None:
    """Raise :class:`ValueError` unless ``feedback`` has everything that ``units`` keep, and nothing of other units."""
    for kind in KINDS:
        for key in sorted(sizes[kind].keys() & set(units)):
            if sizes[kind][key] and key not in feedback[kind]:
                raise ValueError(f"feedback: the {NOUNS[kind]} of {key} is missing")
        for key in sorted(feedback[kind].keys() - set(units)):
            raise ValueError(f"feedback: there is a {NOUNS[kind]} of {key}, which is not in the state's list of units")


def _check_factors(feedback: Mapping[int, RankState]) -> None:
    """Raise :class:`ValueError` unless all ranks have the same factors."""
    for kind in FACTORS:
        first = feedback[0][kind]
        for rank, other in feedback.items():
            for name in first.keys() | other[kind].keys():
                mine, theirs = first.get(name), other[kind].get(name)
                if mine is None or theirs is None or not torch.equal(mine.cpu(), theirs.cpu()):
                    raise ValueError(f"states: ranks 0 and {rank} differ in the factor {kind} of {name}")
