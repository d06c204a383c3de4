"""Checks of the units of a plan: whether they go together, and whether they fit a model; units changed to fit one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.ops import Identity

from ..programs.named import POWERSGD, exact_program
from ..programs.sizes import sizes_of
from ..programs.spans import SHARD, SHARD_OF_LEVELS, Span
from ..programs.steps import Collective, Encode, Level, ProgramError, describe
from ..programs.topology import Topology
from .strides import in_reals
from .units import UnitPlan, takes_shards

# -------------------------------------------------------------------- units among themselves


def contradictions(units: Sequence[UnitPlan], channels: int) -> list[str]:
    """Texts that say why the launches, messages and channels of the units of a plan contradict one another."""
    found = []
    launched = [unit for unit in units if unit.launch is not None]
    if 0 < len(launched) < len(units):
        without = next(unit.key for unit in units if unit.launch is None)
        found.append(f"{without}: launch must be given for all units or for none; {launched[0].key} has one")
    first: dict[str, UnitPlan] = {}
    for unit in units:
        other = first.setdefault(unit.parameter, unit)
        if other.launch != unit.launch and len(launched) == len(units):
            found.append(f"{unit.key}: launch must be {other.launch}, which {other.key} has, got {unit.launch}")
    by_message: dict[int, UnitPlan] = {}
    for unit in units:
        if unit.channel is not None and unit.channel >= channels:
            found.append(f"{unit.key}: channel must be less than channels, which is {channels}, got {unit.channel}")
        if unit.channel and (unit.in_place or unit.program == POWERSGD or not isinstance(unit.compressor, Codec)):
            found.append(f"{unit.key}: channel must be None or 0 for what no compressor encodes, got {unit.channel}")
        if unit.message is not None:
            other = by_message.setdefault(unit.message, unit)
            for name in ("launch", "channel"):
                mine, theirs = getattr(unit, name), getattr(other, name)
                if mine != theirs:
                    same = f"{name} of its message {unit.message}, that of {other.key}"
                    found.append(f"{unit.key}: {name} must be {theirs}, the {same}, or message another one; got {mine}")
    return found


# -------------------------------------------------------------------- units and the parameters of a model


def misfits(
    units: Sequence[UnitPlan],
    known: Mapping[str, torch.nn.Parameter],
    topology: Topology | None,
    world_size: int,
    span: Span,
) -> list[str]:
    """Texts that say why units do not fit the parameters ``known``, or why their programs do not work.

    Args:
        units: all units of a plan.
        known: the parameters of the model by name.
        topology: the topology of the plan, if it has one.
        world_size: the number of ranks.
        span: the states between which programs must go.
    """
    by_parameter = _by_parameter(units)
    wrong = [f"{name}: not in the plan" for name in known if name not in by_parameter]
    for name, parts in by_parameter.items():
        if name not in known:
            wrong.append(f"{name}: not a parameter of the model that needs a gradient")
        elif len(parts) > 1 and any(unit.start is None for unit in parts):
            wrong.append(f"{name}: in the plan {len(parts)} times")
        elif parts[0].parameter == name and all(other in known for other in parts[0].parameters):
            merged = [known[other] for other in parts[0].parameters]
            if problem := _parts_problem(parts, sum(in_reals(parameter).numel() for parameter in merged)):
                wrong.append(f"{name}: {problem}")
            else:
                problems = ((unit.key, _unit_problem(unit, merged, topology, world_size, span)) for unit in parts)
                wrong += [f"{key}: {problem}" for key, problem in problems if problem]
    return wrong + _mixed_launches(units, known)


def fitted_units(
    units: Sequence[UnitPlan], parameters: Mapping[str, torch.Tensor], span: Span
) -> tuple[tuple[UnitPlan, ...], list[str]]:
    """Units changed to fit the parameters, and a list of the changes.

    Units of unknown parameters, or of parameters with another size, are left out. Parameters that are then in no unit
    are averaged exactly; if the units have launches, in launches of their own behind all others.
    """
    known = {name: in_reals(parameter) for name, parameter in parameters.items()}
    grouped = _by_parameter(units).items()
    wrong = {name: _parts_problem(parts, known[name].numel()) for name, parts in grouped if name in known}
    changes: list[str] = []
    kept = []
    for unit in units:
        unknown = [name for name in unit.parameters if name not in known]
        sizes = sum(known[name].numel() for name in unit.parameters if name in known)
        if unknown:
            changes.append(f"{', '.join(unknown)}: not a parameter of the model that needs a gradient")
        elif unit.start is None and sizes != unit.numel:
            changes.append(f"{unit.key}: {unit.numel} elements in the plan, {sizes} in the model")
        elif unit.start is not None and wrong[unit.parameter]:
            changes.append(f"{unit.key}: {wrong[unit.parameter]}")
        else:
            kept.append(unit)
    planned = {name for unit in kept for name in unit.parameters}
    launches: dict[torch.dtype, int] = {}
    last = max((unit.launch for unit in units if unit.launch is not None), default=None)
    for name, reals in known.items():
        if name not in planned:
            changes.append(f"{name}: averaged exactly")
            dtype = parameters[name].dtype
            launch = None if last is None else launches.setdefault(dtype, last + 1 + len(launches))
            kept.append(UnitPlan(name, reals.numel(), Identity(), exact_program(span), False, launch=launch))
    return tuple(kept), changes


def _by_parameter(units: Iterable[UnitPlan]) -> dict[str, list[UnitPlan]]:
    """The units that contain each parameter, or a part of it."""
    found: dict[str, list[UnitPlan]] = {}
    for unit in units:
        for name in unit.parameters:
            found.setdefault(name, []).append(unit)
    return found


def _mixed_launches(units: Sequence[UnitPlan], known: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """A text for each unit whose dtype, in real numbers, differs from its launch's. A launch is one vector."""
    first: dict[int, UnitPlan] = {}
    wrong = []
    for unit in units:
        if unit.launch is None or unit.parameter not in known:
            continue
        other = first.setdefault(unit.launch, unit)
        mine, theirs = known[unit.parameter].dtype, known[other.parameter].dtype
        if mine.to_real() != theirs.to_real():
            wrong.append(f"{unit.key}: launch {unit.launch} has {theirs}, of {other.key}, and the parameter is {mine}")
    return wrong


def _unit_problem(
    unit: UnitPlan, merged: Sequence[torch.nn.Parameter], topology: Topology | None, world_size: int, span: Span
) -> str:
    """A text that says why the unit is not valid for the ``merged`` parameters; ``""`` if it is."""
    dtype = in_reals(merged[0]).dtype
    if any(other.dtype != merged[0].dtype for other in merged):
        return f"merges parameters of {' and '.join(sorted({str(other.dtype) for other in merged}))}"
    if dtype not in GRAD_DTYPES and any(isinstance(step, Encode) for step in unit.program):
        return f"{merged[0].dtype} cannot be encoded, only reduced"
    if not 0 <= unit.root < world_size:
        return f"root must be a rank from 0 to {world_size - 1}, got {unit.root}"
    if (unit.start is not None or unit.also) and not isinstance(unit.compressor, Codec):
        return f"{unit.compressor.name} takes whole parameters, one by one"
    if unit.start is not None and unit.also:
        return "a part of merged parameters"
    if span in (SHARD, SHARD_OF_LEVELS) and not takes_shards(unit.compressor):
        return f"{unit.compressor.name} takes whole parameters, and FSDP has shards of them"
    levels = {step.level for step in unit.program if isinstance(step, Collective)}
    if topology is None and levels - {Level.FLAT}:
        return f"program {describe(unit.program)}: the plan has no topology"
    try:
        for _, compressor in unit.compressor.schedule:
            sizes_of(unit.program, unit.numel, dtype, compressor, topology or Topology(world_size), span)
    except ProgramError as error:
        return str(error)
    return ""


def _parts_problem(parts: list[UnitPlan], numel: int) -> str:
    """A text that says why the parts do not have each of ``numel`` elements once; ``""`` if they do."""
    if parts[0].start is None:
        planned = parts[0].numel
        return "" if planned == numel else f"{planned} elements in the plan, {numel} in the model"
    stop = 0
    for start, size in sorted((unit.start or 0, unit.numel) for unit in parts):
        if start != stop:
            return f"its parts leave a gap, or overlap, between {min(stop, start)} and {max(stop, start)}"
        stop += size
    return "" if stop == numel else f"its parts have {stop} elements, the model's has {numel}"
