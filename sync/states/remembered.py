"""The residuals and factors that a rank keeps for the units of a plan: which there are, how large, and how they lie."""

from __future__ import annotations

import torch

from ..plans.plan import Plan, UnitPlan
from ..programs.named import ENCODED_ALLREDUCE, POWERSGD
from ..programs.residuals import EncodedRegion, encoded_regions
from ..programs.topology import Topology
from ..resources.feedback import ENCODINGS, KINDS

Remembered = dict[str, dict[str, torch.Tensor]]
"""Residuals and factors of one rank: ``{kind: {unit: residual or factor}}``."""
FACTORS = KINDS[len(ENCODINGS) :]
"""The kinds that are no residuals."""


def kept(unit: UnitPlan, topology: Topology, rank: int) -> dict[str, EncodedRegion]:
    """The encodings of a unit of which a rank keeps residuals, by kind: the same kinds on all ranks."""
    # the rounds of a low-rank method are of one encoding
    program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
    each = encoded_regions(program, unit.numel, topology, rank, unit.root)
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


def widths(unit: UnitPlan, topology: Topology) -> dict[str, int]:
    """Elements of the largest residual that a rank keeps of each encoding of a unit; none of empty ones."""
    machine, device = divmod(unit.root, topology.devices)
    # the first part is the largest one, and what is not parted is on all ranks or on the root
    ranks = {first * topology.devices + second for first in (0, machine) for second in (0, device)}
    sizes: dict[str, int] = {}
    for rank in ranks:
        for kind, encoding in kept(unit, topology, rank).items():
            sizes[kind] = max(sizes.get(kind, 0), unit.encoder(kind).states * (encoding.stop - encoding.start))
    return {kind: size for kind, size in sizes.items() if size}


def parted(residual: torch.Tensor, states: int, size: int) -> torch.Tensor:
    """``[states, numel]`` of what lies one stretch of ``size`` elements after the other, all states of it together."""
    stretches = torch.split(residual, states * max(size, 1))
    return torch.cat([stretch.view(states, stretch.numel() // states) for stretch in stretches], dim=1)


def joined(vectors: torch.Tensor, size: int) -> torch.Tensor:
    """The reverse of :func:`parted`."""
    return torch.cat([stretch.flatten() for stretch in torch.split(vectors, max(size, 1), dim=1)])
