"""Plans in which all parameters are treated alike, and what a user may say instead of a plan."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from gckernels.compressor import CHUNK_ALIGN, GRAD_DTYPES, Compressor, chunk_numel
from gckernels.method import Method
from gckernels.ops import Identity

from .arguments import Exempt, as_exempt, as_method, as_program, as_scaler, as_topology
from .budget import within_budget
from .memory import in_reals, memory_shape
from .parameters import differentiable
from .plan import Plan, UnitPlan
from .steps import Broadcast, Program, describe
from .strategies import ALLREDUCE, default_program
from .topology import Topology


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
        program: or its name in ``PROGRAMS``; by default what :func:`~.strategies.default_program` says.
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


@dataclass(frozen=True)
class Choice:
    """What a user says of how to synchronise a model: the arguments of :func:`~.ddp.attach` and of
    :class:`~.synchronizer.Synchronizer`, where they are explained."""

    compressor_or_plan: object
    program: Program | str | None
    exempt: Exempt | Iterable[str] | None
    topology: Topology | tuple[int, int] | None
    strict: bool
    memory_budget_mb: float | None
    grad_scaler: object

    def plan(self, what: str, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> tuple[Plan, str]:
        """The plan that this means, checked, and what to call it in a message to other ranks.

        Args:
            what: the function that was called, for errors.
            parameters: by name.
            world_size: number of ranks.

        Raises:
            TypeError, ValueError, PlanError: something is not valid.
        """
        given, budget = self.compressor_or_plan, self.memory_budget_mb
        scaler = as_scaler(what, self.grad_scaler)
        if isinstance(given, Plan):
            if self.program is not None or self.exempt is not exempt_vectors or self.topology is not None:
                raise ValueError(f"{what}: program, exempt and topology belong to a compressor; a plan has its own")
            plan, summary = given, f"plan {given.fingerprint()[:16]}"
            if not self.strict:
                plan, changes = plan.fitted(parameters.items())
                if changes:
                    listed = "\n  ".join(changes)
                    warnings.warn(f"{what}: the plan does not fit the model:\n  {listed}", stacklevel=2)
        else:
            compressor = as_method(f"{what}: compressor_or_plan", given, otherwise=", or a Plan")
            program = as_program(what, self.program)
            exempt = as_exempt(what, self.exempt, parameters)
            topology = as_topology(what, self.topology)
            plan = uniform_plan(parameters.items(), compressor, world_size, program, exempt, topology)
            programs = sorted({describe(unit.program) for unit in plan.units})
            summary = f"{compressor} through {' and '.join(programs)}"
        plan.check(parameters.items(), world_size)
        if budget is not None:
            if not (isinstance(budget, int | float) and budget >= 0):
                raise ValueError(f"{what}: memory_budget_mb must be None or a number from 0 up, got {budget!r}")
            plan = within_budget(what, plan, parameters, world_size, budget * 2**20, copies=scaler is not None)
        return plan, summary if scaler is None else f"{summary}, with a gradient scaler"
