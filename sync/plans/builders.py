"""Plans in which all parameters are treated alike."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import torch

from gckernels.compressor import CHUNK_ALIGN, GRAD_DTYPES, Compressor, chunk_numel
from gckernels.method import Method
from gckernels.ops import Identity

from ..programs.named import ALLREDUCE, default_program
from ..programs.steps import Broadcast, Program
from ..programs.topology import Topology
from .arguments import Exempt, as_exempt, as_method, as_program, as_topology
from .parameters import differentiable
from .plan import Plan, UnitPlan
from .strides import in_reals, memory_shape


def exempt_vectors(name: str, parameter: torch.nn.Parameter) -> bool:
    """The default rule of exemption: parameters with fewer than two dimensions (biases, norms) are sent exactly.

    They are a fraction of a percent of the elements and carry much of the error when compressed.
    """
    return parameter.dim() < 2


def uniform_plan(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    compressor: Method | str,
    world_size: int,
    program: Program | str | None = None,
    exempt: Exempt | Iterable[str] | None = exempt_vectors,
    topology: Topology | tuple[int, int] | None = None,
) -> Plan:
    """The same compressor and program for every parameter, but for those that ``exempt`` names.

    An exempt parameter goes through the same program as the others, so that it travels in the same messages, with
    :class:`~gckernels.Identity` in the place of the compressor, and so does one that the compressor's ``fit`` declines.
    A parameter whose dtype no compressor takes (float64) is reduced as it is. A complex one counts twice as many real
    numbers.

    Args:
        parameters: all of the model's, with their names. Those that cannot have a gradient, as integers, are left out.
        compressor: or its spec, such as ``"BlockQuant(bits=4)"``.
        world_size: number of ranks.
        program: or its name in ``PROGRAMS``; by default :func:`~gckernels.sync.default_program`.
        exempt: the rule, or the names of the parameters that are exempt; ``None`` for none.
        topology: or ``(machines, devices)``, for programs with levels.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    known = differentiable(parameters)
    compressor = as_method("uniform_plan: compressor", compressor)
    program = as_program("uniform_plan", program)
    exempt = as_exempt("uniform_plan", exempt, known)
    topology = as_topology("uniform_plan", topology)
    program = default_program(compressor, world_size) if program is None else program
    units = []
    for name, parameter in known.items():
        reals = in_reals(parameter)
        encodable = reals.dtype in GRAD_DTYPES
        fitted = encodable and not exempt(name, parameter)
        chosen = compressor.fit(memory_shape(reals)) if fitted else Identity()
        steps = program if encodable else ALLREDUCE
        units.append(UnitPlan(name, reals.numel(), chosen, steps, chosen.needs_feedback))
    return spread_roots(Plan(tuple(units), topology), world_size)


def parted(plan: Plan, most_numel: int) -> Plan:
    """The plan with every unit of one parameter cut into as few equal parts as have at most ``most_numel`` elements
    each, so that encoding, sending and decoding of the parts overlap. What has no parts stays whole: merged units, and
    those of methods that take whole parameters.

    Raises:
        ValueError: ``most_numel`` is less than 16.
    """
    if type(most_numel) is not int or most_numel < CHUNK_ALIGN:
        raise ValueError(f"parted: most_numel must be an int from {CHUNK_ALIGN} up, got {most_numel!r}")
    units: list[UnitPlan] = []
    for unit in plan.units:
        if unit.numel <= most_numel or unit.also or not isinstance(unit.compressor, Compressor):
            units.append(unit)
            continue
        size = min(chunk_numel(unit.numel, -(-unit.numel // most_numel)), most_numel // CHUNK_ALIGN * CHUNK_ALIGN)
        first = unit.start or 0
        for start in range(0, unit.numel, size):
            units.append(replace(unit, start=first + start, numel=min(size, unit.numel - start)))
    return replace(plan, units=tuple(units))


def spread_roots(plan: Plan, world_size: int) -> Plan:
    """The plan with the roots of its units spread over the ranks: each unit, from the largest to the smallest, goes to
    the rank that has least. Units whose programs have no root stay as they are."""
    load = [(0, rank) for rank in range(world_size)]  # a heap
    roots: dict[int, int] = {}
    for index in sorted(range(len(plan.units)), key=lambda index: (-plan.units[index].numel, index)):
        if any(isinstance(step, Broadcast) for step in plan.units[index].program):
            least, roots[index] = load[0]
            heapq.heapreplace(load, (least + plan.units[index].numel, roots[index]))
    units = (replace(unit, root=roots.get(index, unit.root)) for index, unit in enumerate(plan.units))
    return replace(plan, units=tuple(units))
