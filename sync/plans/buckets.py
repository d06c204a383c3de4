"""Buckets of a plan: which units lie together in a vector, and in which order the vectors are launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .grouping import PlacedUnit
from .plan import Plan, UnitPlan


@dataclass(frozen=True)
class BucketSpec:
    """Units that lie in one vector.

    Attributes:
        groups: the units in order; those that share a parameter are a group.
        dtype: the dtype of the parameters.
    """

    groups: tuple[tuple[PlacedUnit, ...], ...]
    dtype: torch.dtype

    @property
    def units(self) -> tuple[PlacedUnit, ...]:
        """All units, in order."""
        return tuple(unit for group in self.groups for unit in group)

    @property
    def numel(self) -> int:
        """The number of elements of the vector, in real numbers."""
        return self.groups[-1][-1].stop


def cut_buckets(plan: Plan, dtypes: Mapping[str, torch.dtype], max_nbytes: float) -> list[BucketSpec]:
    """The buckets of a plan, in the order in which they are launched: from the last unit of the plan to the first.

    Args:
        plan: a plan that has been checked.
        dtypes: the dtypes of the parameters, by name. A bucket has parameters of one dtype.
        max_nbytes: the maximum size of a bucket. Only a bucket with a single group of units may be larger.
    """
    buckets: list[BucketSpec] = []
    gathered: list[tuple[PlacedUnit, ...]] = []
    numel, dtype = 0, torch.float32
    for group in _groups(plan):
        size, group_dtype = sum(unit.numel for unit in group), dtypes[group[0].parameter]
        if gathered and ((numel + size) * _real_nbytes(dtype) > max_nbytes or group_dtype != dtype):
            buckets.append(BucketSpec(tuple(gathered), dtype))
            gathered, numel = [], 0
        placed = []
        for unit in group:
            placed.append(PlacedUnit(unit, numel))
            numel += unit.numel
        gathered.append(tuple(placed))
        dtype = group_dtype
    if gathered:
        buckets.append(BucketSpec(tuple(gathered), dtype))
    return buckets


def _real_nbytes(dtype: torch.dtype) -> int:
    """The bytes of a real number of the dtype; a complex number has two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _groups(plan: Plan) -> list[list[UnitPlan]]:
    """The units of the plan from the last to the first; the parts of one parameter are a group, in order."""
    groups: dict[str, list[UnitPlan]] = {}
    for unit in reversed(plan.units):
        groups.setdefault(unit.parameter, []).append(unit)
    return [sorted(group, key=lambda unit: unit.start or 0) for group in groups.values()]
