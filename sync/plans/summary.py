"""Plans in a few words."""

from __future__ import annotations

from collections import Counter

from gckernels.ops import Identity

from .names import program_name, short_spec
from .plan import Plan

_WAYS = 4


def summary_of(plan: Plan, world_size: int) -> str:
    """The compressors and programs of a plan with their numbers of units, such as ``"14 BlockQuant(bits=4) by
    allgather, 3 exact; 2 channels"``.

    Args:
        plan: the plan.
        world_size: the number of ranks.
    """
    ways = Counter(
        "exact"
        if isinstance(unit.compressor, Identity)
        else f"{short_spec(unit.compressor)} by {program_name(unit.program, world_size)}"
        for unit in plan.units
    )
    parts = [f"{count:,} {sent}" for sent, count in ways.most_common(_WAYS)]
    if len(ways) > len(parts):
        parts.append(f"{sum(ways.values()) - sum(count for _, count in ways.most_common(_WAYS)):,} others")
    channels = f"; {plan.channels} channels" if plan.channels > 1 else ""
    return f"{', '.join(parts)}{channels}"
