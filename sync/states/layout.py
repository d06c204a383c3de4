"""The residuals and factors that a rank keeps for the units of a plan: their kinds, sizes and layout."""

from __future__ import annotations

from typing import Any

import torch

from ..plans.grouping import message_kind
from ..plans.plan import Plan, UnitPlan
from ..programs.named import ENCODED_ALLREDUCE
from ..programs.residuals import ENCODINGS, EncodedRegion, encoded_regions
from ..programs.stages import MessageKind
from ..programs.steps import Collective, Level
from ..programs.topology import Topology
from ..resources.feedback import KINDS

RankState = dict[str, dict[str, torch.Tensor]]
"""Residuals and factors of one rank: ``{kind: {unit: residual or factor}}``."""
FACTORS = KINDS[len(ENCODINGS) :]
"""The kinds of factors."""


def kept_regions(unit: UnitPlan, topology: Topology, rank: int) -> dict[str, EncodedRegion]:
    """The encodings of a unit for which ``rank`` keeps residuals, by kind. The kinds are the same on all ranks."""
    # all rounds of a low-rank method belong to one encoding
    program = ENCODED_ALLREDUCE if message_kind([unit]) == MessageKind.LOW_RANK else unit.program
    each = encoded_regions(program, unit.numel, topology, rank, unit.root)
    return {kind: encoding for kind, encoding in zip(ENCODINGS, each, strict=False) if unit.has_residual(kind)}


def route(unit: UnitPlan, topology: Topology) -> Any:
    """The route of a unit: equal routes mean that every rank encodes the same elements, in the same order."""
    levels = {step.level for step in unit.program if isinstance(step, Collective)}
    return unit.program, unit.root, topology.world_size if levels <= {Level.FLAT} else topology


def residual_sizes(plan: Plan, topology: Topology, rank: int) -> dict[str, dict[str, int]]:
    """Numbers of elements of all residuals and factors that ``rank`` can have: ``{kind: {unit: numel}}``."""
    sizes: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for unit in plan.units:
        for kind, encoding in kept_regions(unit, topology, rank).items():
            sizes[kind][unit.key] = unit.encoder(kind).traits.states * (encoding.stop - encoding.start)
        for kind, numel in unit.compressor.factor_sizes(unit.numel).items():
            sizes[kind][unit.key] = numel
    return sizes


def max_sizes(unit: UnitPlan, topology: Topology) -> dict[str, int]:
    """Number of elements, by kind, of the largest residual of a unit on any rank. Empty residuals are left out."""
    machine, device = divmod(unit.root, topology.devices)
    # the first shard is the largest one; data that is not sharded is on all ranks or on the root
    ranks = {first * topology.devices + second for first in (0, machine) for second in (0, device)}
    sizes: dict[str, int] = {}
    for rank in ranks:
        for kind, encoding in kept_regions(unit, topology, rank).items():
            sizes[kind] = max(sizes.get(kind, 0), unit.encoder(kind).traits.states * (encoding.stop - encoding.start))
    return {kind: size for kind, size in sizes.items() if size}


def split_states(residual: torch.Tensor, states: int, size: int) -> torch.Tensor:
    """A residual as ``[states, numel]``.

    Args:
        residual: ``[states * numel]``: stretches of ``size`` elements, each with all of its states together.
        states: vectors that the compressor keeps of a unit.
        size: elements of a stretch; the last one may have fewer.
    """
    stretches = torch.split(residual, states * max(size, 1))
    return torch.cat([stretch.view(states, stretch.numel() // states) for stretch in stretches], dim=1)


def join_states(vectors: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of :func:`split_states`: ``[states * numel]`` from ``vectors [states, numel]``."""
    return torch.cat([stretch.flatten() for stretch in torch.split(vectors, max(size, 1), dim=1)])
