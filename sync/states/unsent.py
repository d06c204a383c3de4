"""The part of residuals that is gradient to be sent yet, and the states that outlive a change of the plan.

The last state of a residual is encoded, and has not been sent. States before it are momenta. So is the only state of a
method whose payloads do not average, such as the votes of ``SigNUM``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from gckernels.compressor import Compressor

from ..plans.plan import Plan, UnitPlan
from ..programs.residuals import ENCODINGS
from ..programs.topology import Topology
from ..resources.feedback import KINDS, Feedback
from ..resources.residual import Residual
from .layout import FACTORS, RankState, kept_regions, route

Kept = Callable[[str, str], torch.Tensor | None]
"""The residual or factor of a kind and a unit; ``None`` if there is none."""


@dataclass(frozen=True)
class Unsent:
    """A stretch of gradient that has not been sent."""

    start: int  # the index of its first element in the unit
    weight: float  # its weight in the mean over all ranks
    values: torch.Tensor  # the stretch, [numel], where it lies in the residual


def unsent(unit: UnitPlan, topology: Topology, rank: int, kept: Kept) -> Iterator[Unsent]:
    """The stretches of a unit that ``rank`` has not sent, in all its residuals.

    The sum over all ranks of ``weight * values``, each at its elements, is the mass of the unit.
    """
    for kind, region in kept_regions(unit, topology, rank).items():
        residual, method = kept(kind, unit.key), unit.encoder(kind)
        if residual is None or not _holds_gradient(method):
            continue
        start, states = region.start, method.traits.states
        for stretch in torch.split(residual, states * max(region.size, 1)):
            values = stretch.view(states, -1)[-1]
            yield Unsent(start, region.weight, values)
            start += values.numel()


def taken(unit: UnitPlan, topology: Topology, rank: int, feedback: Feedback) -> Iterator[Unsent]:
    """The stretches of :func:`unsent`, each of which becomes zero when the next one is asked for."""
    held: list[tuple[Residual, torch.Tensor]] = []

    def kept(kind: str, key: str) -> torch.Tensor | None:
        if (residual := feedback.find(kind, key)) is None:
            return None
        held.append((residual, residual.values()))
        return held[-1][1]

    for each in unsent(unit, topology, rank, kept):
        yield each
        each.values.zero_()
    for residual, values in held:
        residual.write(values)


def unsent_by_parameter(
    units: Iterable[UnitPlan], topology: Topology, rank: int, kept: Kept, sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The stretches of some units that ``rank`` has not sent, as its part in the mean over all ranks.

    Args:
        kept: the residuals of the rank.
        sizes: the number of elements of each parameter, in real numbers.

    Returns:
        For every parameter of the units ``fp32 [numel]``; parameters of which the rank has nothing are missing.
    """
    found: dict[str, torch.Tensor] = {}
    for unit in units:
        for each in unsent(unit, topology, rank, kept):
            if not bool(each.values.any()):
                continue
            whole = torch.zeros(
                sum(sizes[name] for name in unit.parameters), dtype=torch.float32, device=each.values.device
            )
            start = (unit.start or 0) + each.start
            whole[start : start + each.values.numel()] = each.values * (each.weight * topology.world_size)
            parts = torch.split(whole, [sizes[name] for name in unit.parameters])
            for name, part in zip(unit.parameters, parts, strict=True):
                found[name] = found[name] + part if name in found else part
    return found


def _holds_gradient(method: Compressor) -> bool:
    return method.traits.conserves or method.traits.averages


def carried(old: Plan, new: Plan, world_size: int, rank: int, state: RankState) -> tuple[set[str], RankState]:
    """The states with which a new plan begins after an old one, and the units that they are of.

    A unit that stays as it is keeps its momenta and factors. Gradient that has not been sent becomes zero.

    Args:
        old, new: the plan before, and the one that follows.
        world_size, rank: the number of ranks, and the rank of the state.
        state: all residuals and factors of the rank; a copy, which is changed.

    Returns:
        The keys of the units, the same on all ranks that have the same ``state`` entries; and their states.
    """
    before, after = old.topology_of(world_size), new.topology_of(world_size)
    keys, found = set(), {kind: dict[str, torch.Tensor]() for kind in KINDS}
    for unit in new.units:
        known = old.by_key.get(unit.key)
        if known is None or not _stays(known, before, unit, after) or not _has_memory(unit):
            continue
        for each in unsent(unit, after, rank, lambda kind, key: state[kind].get(key)):
            each.values.zero_()
        keys.add(unit.key)
        for kind in KINDS:
            if unit.key in state[kind]:
                found[kind][unit.key] = state[kind][unit.key]
    return keys, found


def _stays(old: UnitPlan, before: Topology, new: UnitPlan, after: Topology) -> bool:
    same = (old.numel, old.compressor, old.feedback) == (new.numel, new.compressor, new.feedback)
    return same and route(old, before) == route(new, after)


def _has_memory(unit: UnitPlan) -> bool:
    """Whether the unit keeps something besides gradient that has not been sent."""
    methods = [unit.encoder(kind) for kind in ENCODINGS if unit.has_residual(kind)]
    if any(method.traits.states > 1 or not _holds_gradient(method) for method in methods):
        return True
    return bool(FACTORS and unit.compressor.factor_sizes(unit.numel))
