"""Names of compressors, programs and plans, as short as a user would write them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch

from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..programs.named import PROGRAMS, ring
from ..programs.steps import Collective, Place, Program, describe
from .plan import Plan

_WAYS = 4  # kinds of units that a summary lists
_FITTED = ("rows",)  # fields that fitting to a shape sets, and no user


def short_spec(method: Compressor) -> str:
    """The spec of a method without the fields that have their defaults, such as ``"BlockQuant(bits=4)"``."""
    given = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.name not in _FITTED and value != field.default:
            given.append(f"{field.name}={_written(value)}")
    return f"{method.name}({', '.join(given)})" if given else method.name


def _written(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def program_name(program: Program, world_size: int) -> str:
    """The name of a program, or its collectives if it has none, such as ``"Reduce(intra)+AllGather(inter)"``."""
    for name, known in PROGRAMS.items():
        if program == known:
            return name
    if world_size > 1 and program == ring(world_size):
        return "ring"
    collectives = [step for step in program if isinstance(step, Collective)]
    on_host = any(getattr(step, "place", None) == Place.HOST for step in program)
    return "+".join(describe((step,)) for step in collectives) + (" on the host" if on_host else "")


def summary_of(plan: Plan, world_size: int) -> str:
    """The compressors and programs of a plan with their numbers of units, such as ``"14 BlockQuant(bits=4) by
    allgather, 3 exact; 2 channels"``."""
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
    weights = "" if plan.weights is None else f"; parameters by {short_spec(plan.weights)}"
    return f"{', '.join(parts)}{channels}{weights}"
