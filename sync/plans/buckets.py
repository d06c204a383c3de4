"""Buckets of a plan: which units lie together in a vector, and in which order the vectors are launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .grouping import PlacedUnit
from .plan import Plan, UnitPlan

BUCKET_NBYTES = 25 * 2**20
"""The size of a bucket of DDP or a bare module, unless its user asks for another."""
UPDATE_BUCKET_NBYTES = 4 * 2**20
"""The size of a bucket of updates. They are all ready at once, so small buckets let the first ones travel while others
are measured and encoded."""

_Group: TypeAlias = list[UnitPlan]
"""Units that share a parameter, in its order."""


@dataclass(frozen=True)
class BucketSpec:
    """Units that lie in one vector."""

    groups: tuple[tuple[PlacedUnit, ...], ...]  # the units in order; those that share a parameter are a group
    dtype: torch.dtype  # the dtype of its elements, which are real

    @property
    def units(self) -> tuple[PlacedUnit, ...]:
        """All units, in order."""
        return tuple(unit for group in self.groups for unit in group)

    @property
    def numel(self) -> int:
        """The number of elements of the vector, in real numbers."""
        return self.groups[-1][-1].stop


def cut_buckets(plan: Plan, dtypes: Mapping[str, torch.dtype], max_nbytes: float) -> list[BucketSpec]:
    """The buckets of a plan, in the order in which they are launched.

    If the plan has launches, they are the buckets. Otherwise buckets are filled from the last unit of the plan to the
    first. Units lie in a bucket in this order in both cases.

    Args:
        plan: a plan that has been checked.
        dtypes: the dtypes of the parameters, by name. A bucket has parameters of one dtype.
        max_nbytes: the maximum size of a bucket that is filled. Only one with a single group of units may be larger.
    """
    groups = _groups(plan)
    found = _launched(groups) if plan.has_launches else _filled(groups, dtypes, max_nbytes)
    return [_placed(bucket, dtypes) for bucket in found]


def _launched(groups: Sequence[_Group]) -> list[list[_Group]]:
    """The groups of each launch, in the order of the launches."""
    launches: dict[int, list[_Group]] = {}
    for group in groups:
        assert group[0].launch is not None
        launches.setdefault(group[0].launch, []).append(group)
    return [launches[number] for number in sorted(launches)]


def _filled(groups: Sequence[_Group], dtypes: Mapping[str, torch.dtype], max_nbytes: float) -> list[list[_Group]]:
    """The groups in buckets of one dtype each and of at most ``max_nbytes``."""
    buckets: list[list[_Group]] = []
    numel, dtype = 0, None
    for group in groups:
        size, group_dtype = sum(unit.numel for unit in group), dtypes[group[0].parameter]
        if group_dtype != dtype or (numel + size) * _real_nbytes(group_dtype) > max_nbytes:
            buckets.append([])
            numel, dtype = 0, group_dtype
        buckets[-1].append(group)
        numel += size
    return buckets


def _placed(groups: Sequence[_Group], dtypes: Mapping[str, torch.dtype]) -> BucketSpec:
    """The bucket with these groups, one behind the other. A complex parameter begins at an even number of reals, where
    torch can view them as complex."""
    placed: list[tuple[PlacedUnit, ...]] = []
    start = 0
    for group in groups:
        units = []
        if dtypes[group[0].parameter].is_complex:
            start += start % 2
        for unit in group:
            units.append(PlacedUnit(unit, start))
            start += unit.numel
        placed.append(tuple(units))
    return BucketSpec(tuple(placed), dtypes[groups[0][0].parameter].to_real())


def _real_nbytes(dtype: torch.dtype) -> int:
    """The bytes of a real number of the dtype; a complex number has two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _groups(plan: Plan) -> list[_Group]:
    """The units of the plan from the last to the first; the parts of one parameter are a group, in order."""
    groups: dict[str, list[UnitPlan]] = {}
    for unit in reversed(plan.units):
        groups.setdefault(unit.parameter, []).append(unit)
    return [sorted(group, key=lambda unit: unit.start or 0) for group in groups.values()]
