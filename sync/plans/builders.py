"""Functions that make plans and change them: one compressor for all, large units in parts, roots spread over ranks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace

import torch

from gckernels.codec import CHUNK_ALIGN, GRAD_DTYPES, Codec, chunk_numel
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..programs.named import ALLREDUCE, default_program
from ..programs.steps import Broadcast, Program
from ..programs.topology import Topology
from .arguments import Exempt
from .plan import Plan, UnitPlan
from .strides import in_reals, memory_shape


def exempt_vectors(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter has fewer than two dimensions, as biases and norms do: the default rule of exemption for all
    compressors but ``Cast16``.

    Vectors are a fraction of a percent of the elements, and cause much of the error when they are compressed.
    """
    return parameter.dim() < 2


def uniform_plan(
    parameters: Mapping[str, torch.nn.Parameter],
    compressor: Compressor,
    world_size: int,
    program: Program | None = None,
    exempt: Exempt | None = None,
    topology: Topology | None = None,
) -> Plan:
    """The plan of :func:`gckernels.sync.plan`, which checks the arguments and the result.

    Args:
        parameters: by their plain names, without those that cannot have a gradient.
        compressor: for all parameters that are not exempt.
        world_size: the number of ranks.
        program: ``None`` for that of :func:`~gckernels.sync.programs.default_program`.
        exempt: whether a parameter is sent exactly; ``None`` for :func:`exempt_vectors`, and for no parameter with a
            compressor whose payloads are added.
        topology: the machines and devices that the plan is for, if its program has levels.
    """
    if program is None:
        program = default_program(compressor, world_size)
    if exempt is None:
        exempt = (lambda name, parameter: False) if compressor.traits.summable else exempt_vectors
    units = []
    for name, parameter in parameters.items():
        reals = in_reals(parameter)
        encodable = reals.dtype in GRAD_DTYPES
        compressed = encodable and not exempt(name, parameter)
        fitted = compressor.fit(memory_shape(reals)) if compressed else Identity()
        steps = program if encodable else ALLREDUCE
        units.append(UnitPlan(name, reals.numel(), fitted, steps, fitted.traits.needs_feedback))
    return spread_roots(Plan(tuple(units), topology), world_size)


def parted(plan: Plan, max_numel: int) -> Plan:
    """The plan with large units cut into parts, so that encoding, sending and decoding of the parts overlap.

    Each unit becomes as few equal parts as have at most ``max_numel`` elements each. Every part is a message by itself,
    and takes the next channel. Merged units, and units of methods that take whole parameters, stay whole.

    Raises:
        ValueError: ``max_numel`` is less than 16.
    """
    if type(max_numel) is not int or max_numel < CHUNK_ALIGN:
        raise ValueError(f"parted: max_numel must be an int from {CHUNK_ALIGN} up, got {max_numel!r}")
    units: list[UnitPlan] = []
    for unit in plan.units:
        if unit.numel <= max_numel or unit.also or not isinstance(unit.compressor, Codec):
            units.append(unit)
            continue
        size = min(chunk_numel(unit.numel, -(-unit.numel // max_numel)), max_numel // CHUNK_ALIGN * CHUNK_ALIGN)
        first = unit.start or 0
        for start in range(0, unit.numel, size):
            numel = min(size, unit.numel - start)
            units.append(replace(unit, start=first + start, numel=numel, message=None, channel=None))
    return plan.with_units(units)


def spread_roots(plan: Plan, world_size: int) -> Plan:
    """The plan with the roots of its units spread over the ranks.

    From the largest unit to the smallest, each gets the rank that has the fewest elements so far as its root. Units
    whose programs have no root stay as they are.
    """
    load = [(0, rank) for rank in range(world_size)]  # a heap
    roots: dict[int, int] = {}
    for index in sorted(range(len(plan.units)), key=lambda index: (-plan.units[index].numel, index)):
        if any(isinstance(step, Broadcast) for step in plan.units[index].program):
            least, roots[index] = load[0]
            heapq.heapreplace(load, (least + plan.units[index].numel, roots[index]))
    return plan.with_units(replace(unit, root=roots.get(index, unit.root)) for index, unit in enumerate(plan.units))
