"""What a user says of how to synchronise a model, and the plan that this means."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..plans.arguments import Exempt, as_exempt, as_method, as_program, as_scaler, as_topology
from ..plans.builders import exempt_vectors, uniform_plan
from ..plans.plan import Plan
from ..programs.steps import Program, describe
from ..programs.topology import Topology
from .budget import within_budget


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
