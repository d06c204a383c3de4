"""Plans that users ask for: :func:`uniform_plan` makes one, :class:`Request` checks what ``attach`` is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..engine.runtime import Runtime
from ..plans.arguments import Exempt, as_exempt, as_method, as_named_parameters, as_program, as_topology, as_weights
from ..plans.builders import plan_of_parameters
from ..plans.plan import Frontend, Plan, PlanError
from ..programs.named import exact_program
from ..programs.steps import Program, describe
from ..programs.topology import Topology
from .checks.models import refuse_without_shape, why_uncompressed
from .kinds import frontend_of, kind_of
from .members import left_out
from .ownership import averaged_parameters

_CALLER = "attach"
UNCOMPRESSED = Identity()
"""The compressor of a request whose plan is found later. Until then the model averages its gradients itself."""


def uniform_plan(
    model: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]],
    compressor: Compressor | str,
    *,
    program: Program | str | None = None,
    exempt: Exempt | Iterable[str] | Literal["default"] | None = "default",
    topology: Topology | tuple[int, int] | None = None,
    world_size: int | None = None,
) -> Plan:
    """A plan with the same compressor and program for every parameter that is not exempt.

    :func:`~gckernels.sync.attach` takes the plan. All ranks make the same one. Making it is not collective, and needs
    no process group if ``world_size`` or ``topology`` is given.

    An exempt parameter is sent exactly, by :class:`~gckernels.Identity` in the same program, so that it travels in the
    same messages as the others. The same holds for a parameter that the compressor does not take, such as a vector for
    ``PowerSGD``. Parameters of a dtype that no compressor takes (float64) are averaged by a plain all-reduce.

    Args:
        model: a DDP model or one of ``fully_shard`` or ``replicate``, whose plan has the parameters that DDP or FSDP
            averages, without those that they ignore (frozen ones among them, if they have been frozen since
            :func:`~gckernels.sync.attach`); or a bare module, whose plan has all parameters that can have a
            gradient, frozen or not, but those that DDP would ignore; or pairs of name and parameter, such as
            ``module.named_parameters()``.
        compressor: a compressor such as ``EFSignSGD()``, or its spec such as ``"BlockQuant(bits=4)"``.
        program: the steps by which parameters are sent, or their name in ``sync.programs.PROGRAMS``. The default is
            that of :func:`~gckernels.sync.programs.default_program`.
        exempt: the parameters that are sent exactly: a function ``(name, parameter) -> bool``, a list of names, or
            ``None`` for no parameter. The default is :func:`~gckernels.sync.exempt_vectors`, which exempts parameters
            with fewer than two dimensions; and no parameter for a compressor whose payloads are added (``Cast16``),
            because exact units would need separate messages.
        topology: the machines and the devices of each, or a pair ``(machines, devices)``. Programs with levels need it.
        world_size: the number of ranks. The default is that of ``topology``, and without one that of the process group
            of the DDP model, or else of the default process group.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
        PlanError: the program does not work for the compressor, the topology or the number of ranks.
    """
    unwrapped = getattr(model, "_orig_mod", model) if isinstance(model, torch.nn.Module) else model
    ddp_model = unwrapped if isinstance(unwrapped, DistributedDataParallel) else None
    parameters = as_named_parameters("uniform_plan", model) if ddp_model is None else averaged_parameters(ddp_model)
    if ddp_model is None and isinstance(model, torch.nn.Module):
        ignored = left_out(model)
        parameters = {name: each for name, each in parameters.items() if name not in ignored}
    refuse_without_shape("uniform_plan", parameters)
    kind = kind_of(unwrapped)
    sharded: Any = frontend_of(unwrapped) if kind.traits.shards_on_all is not None else None
    if sharded is not None:
        served = sharded.served(unwrapped)
        parameters = {name: each for name, each in parameters.items() if name in served}
    method = as_method("uniform_plan: compressor", compressor)
    steps = as_program("uniform_plan", program)
    is_exempt = None if exempt == "default" else as_exempt("uniform_plan", exempt, parameters)
    shape = as_topology("uniform_plan", topology)
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ValueError(f"uniform_plan: world_size must be None or an int from 1 up, got {world_size!r}")
    if world_size is None and shape is not None:
        world_size = shape.world_size
    if world_size is None:
        if not dist.is_initialized():
            raise ValueError("uniform_plan: world_size must be given, because torch.distributed is not initialised")
        group = None if ddp_model is None else ddp_model.process_group
        world_size = dist.get_world_size(group if sharded is None else sharded.averaging(unwrapped))
    made = plan_of_parameters(parameters, method, world_size, steps, is_exempt, shape, kind.span(shape))
    if method != UNCOMPRESSED and (why := why_uncompressed(parameters)):
        warnings.warn(f"uniform_plan: {method} compresses nothing: {why}; the plan averages exactly", stacklevel=2)
    made.check(parameters.items(), world_size)
    return made


@dataclass(frozen=True)
class ModuleOptions:
    """The arguments of ``attach`` that DDP models do not need, because DDP has its own.

    Attributes:
        process_group: the ranks that average their gradients; ``None`` for all.
        bucket_cap_mb: MiB of gradients that are launched together; ``None`` for the default.
        find_unused_parameters: gradients may be missing when backward ends.
        exclude: the names of parameters and buffers that each rank has alone.
    """

    process_group: dist.ProcessGroup | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    exclude: Sequence[str] = ()

    def check(self) -> None:
        """Raise unless all are valid."""
        cap, unused = self.bucket_cap_mb, self.find_unused_parameters
        if not (cap is None or (isinstance(cap, int | float) and cap > 0)):
            raise ValueError(f"{_CALLER}: bucket_cap_mb must be None or a number above 0, got {cap!r}")
        if type(unused) is not bool:
            raise TypeError(f"{_CALLER}: find_unused_parameters must be True or False, got {unused!r}")

    def refuse(self) -> None:
        """Raise a ValueError if one is given, though the model has its own."""
        for name, value in vars(self).items():
            if value is not (default := getattr(ModuleOptions(), name)):
                raise ValueError(
                    f"{_CALLER}: {name} is only for bare modules; DDP and FSDP2 have their own setting; "
                    f"leave it at {default}, got {value!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``attach``, which documents them, and the ranks that have given them.

    Attributes:
        frontend: the kind of the model.
        group: all ranks that average their gradients.
        everyone: all ranks of the model, which agree with each other.
        device: the device of the gradients.
        plan: what is given as ``how``; :data:`UNCOMPRESSED` if a plan is to be found.
        options: the arguments for bare modules.
        is_tuned: whether plans are found while the model is trained. Then ``weights`` is one of the things to try, and
            otherwise it is that of each plan without its own.
        decay: the feedback of all units that have any; ``None`` for that of each plan.
        left_out: the plain names of parameters that are not averaged. Units of a plan for them are dropped.
        argument: the argument that has the plan, for errors.
        others: what that may be beside a compressor, for errors.
    """

    argument: ClassVar[str] = f"{_CALLER}: how"
    others: ClassVar[str] = "a Plan, an Auto, Updates"

    frontend: Frontend
    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    device: torch.device
    plan: Plan | Compressor | str
    strict: bool = True
    memory_budget_mb: float | None = None
    grad_scaler: GradScaler | Sequence[GradScaler] | None = None
    can_discard: bool = False
    residual_bits: int
    weights: Compressor | str | None = None
    seed: int
    start_step: int
    options: ModuleOptions
    is_tuned: bool = False
    decay: float | None = None
    left_out: frozenset[str] = frozenset()

    @property
    def enabled_scaler(self) -> GradScaler | None:
        """The gradient scaler; ``None`` if there is none or it is not enabled."""
        scaler = self.grad_scaler
        return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None

    @property
    def compresses_from(self) -> int:
        """The first step that a runtime may compress. Where plans are found, that is told when one follows."""
        return 0 if self.is_tuned else self.start_step

    @property
    def gathered_by(self) -> Codec | None:
        """The compressor that may encode the parameters that are gathered; ``None`` if none may.

        Raises:
            TypeError, ValueError: it is none that may be used there, or the model gathers no parameters.
        """
        if self.weights is None:
            return None
        method = as_weights(f"{_CALLER}: weights", self.weights)
        if not self.frontend.gathers:
            raise ValueError(
                f"{_CALLER}: weights must be None for a model that is not of fully_shard without replicas, got {method}"
            )
        return method

    def runtime(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter], synchronises: bool = True) -> Runtime:
        """A runtime for a plan, with the settings of the request. Collective.

        Args:
            plan: the plan, which all ranks have agreed on.
            parameters: its parameters, by name.
            synchronises: as for :class:`~gckernels.sync.engine.runtime.Runtime`.
        """
        settings = (self.group, self.device, self.seed, self.compresses_from, self.enabled_scaler, parameters)
        return Runtime(plan, *settings, synchronises, self.can_discard, self.residual_bits)

    def checked(self, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[Plan, str]:
        """The plan that is asked for, and a summary of the request, which must be the same on all ranks.

        Args:
            parameters: the parameters that the plan is for, by name.

        Raises:
            TypeError, ValueError, PlanError: an argument is not valid.
        """
        world_size = dist.get_world_size(self.group)
        plan, summary = self._plan(parameters, world_size)
        if (decay := self.decay) is not None:
            plan = plan.with_units(unit.decaying(decay) for unit in plan.units)
        if (method := self.gathered_by) is not None:
            summary += f", parameters by {method}"
            if plan.weights is None and not self.is_tuned:
                plan = replace(plan, weights=method)
        try:
            plan.check(parameters.items(), world_size)
        except PlanError as error:
            if not isinstance(self.plan, Plan):
                raise
            raise PlanError(f"{error}\n{self._advice}") from error
        if self.memory_budget_mb is not None:
            budget_nbytes, copies = self.memory_budget_mb * 2**20, self.can_discard or self.enabled_scaler is not None
            limits = budget_nbytes, copies, self.residual_bits
            from . import budget

            plan = budget.within_budget(_CALLER, plan, parameters, world_size, *limits)
        if self.enabled_scaler is not None:
            summary += ", with a gradient scaler"
        if self.can_discard:
            summary += ", with steps that can be discarded"
        if self.residual_bits != 32:
            summary += f", residuals in {self.residual_bits} bits"
        summary += f", seed {self.seed}, start_step {self.start_step}, gckernels {gckernels.__version__}"
        devices = {parameter.device for parameter in parameters.values()}
        arithmetic = {unit.compressor.arithmetic(device) for unit in plan.units for device in devices} - {""}
        return plan, ", ".join((summary, *sorted(arithmetic)))

    @property
    def _advice(self) -> str:
        """The ways to get a plan that fits, for errors."""
        advice = "make a plan for this model and these ranks, with sync.uniform_plan or gckernels plan"
        return f"{advice}; strict=False averages exactly what does not fit the model" if self.strict else advice

    def for_vectors(self, compressor: Compressor) -> Compressor:
        """The compressor of vectors, where all other parameters have one of their own."""
        return Identity()

    def _plan(self, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> tuple[Plan, str]:
        if isinstance(self.plan, Plan):
            self._refuse_another_frontend(self.plan)
            averaged = [unit for unit in self.plan.units if not self.left_out.issuperset(unit.parameters)]
            given = self.plan if len(averaged) == len(self.plan.units) else self.plan.with_units(averaged)
            if self.strict:
                return given, f"plan {given.fingerprint()[:16]}"
            fitted, changes = given.fitted(parameters.items())
            if changes:
                listed = "\n  ".join(changes)
                warnings.warn(f"{_CALLER}: the plan does not fit the model:\n  {listed}", stacklevel=2)
            return fitted, f"plan {given.fingerprint()[:16]}"
        span = self.frontend.span()
        program = exact_program(span) if self.plan is UNCOMPRESSED else None
        compressor = as_method(self.argument, self.plan, otherwise=self.others)
        made = plan_of_parameters(
            parameters, compressor, world_size, program, span=span, otherwise=self.for_vectors(compressor)
        )
        if compressor != Identity() and all(unit.compressor == Identity() for unit in made.units):
            why = why_uncompressed(parameters) or "it takes none of the parameters that have two dimensions or more"
            goes_on = "gradients are averaged exactly"
            warnings.warn(f"{_CALLER}: {compressor} compresses nothing: {why}; {goes_on}", stacklevel=2)
        programs = sorted({describe(unit.program) for unit in made.units})
        return made, f"{compressor} through {' and '.join(programs)}"

    def _refuse_another_frontend(self, plan: Plan) -> None:
        """Raise :class:`PlanError` if the plan is for another kind of model."""
        made_for = plan.made_for
        if made_for is self.frontend or (made_for is None and plan.span == self.frontend.span()):
            return
        served = "models without shards" if made_for is None else made_for.traits.models
        if plan.has_launches:
            why = "its units have launches, and other models have their own buckets"
        else:
            why = f"its programs end with {plan.span.end}" if made_for is None else "it says so (frontend)"
        raise PlanError(
            f"{_CALLER}: the plan is for {served}: {why}; make a plan with gckernels plan "
            f"--frontend {self.frontend.value}, or pass plan.for_frontend(sync.{self.frontend})"
        )

    def check_settings(self) -> None:
        """Raise a TypeError or a ValueError if a setting is not valid that has nothing to do with the model."""
        budget, scaler = self.memory_budget_mb, self.grad_scaler
        if type(self.strict) is not bool:
            raise TypeError(f"{_CALLER}: strict must be True or False, got {self.strict!r}")
        if budget is not None and not (isinstance(budget, int | float) and budget >= 0):
            raise ValueError(f"{_CALLER}: memory_budget_mb must be None or a number from 0 up, got {budget!r}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            got = type(scaler).__name__
            raise TypeError(f"{_CALLER}: grad_scaler must be a torch.amp.GradScaler or None, got {got}")
        if type(self.can_discard) is not bool:
            raise TypeError(f"{_CALLER}: can_discard must be True or False, got {self.can_discard!r}")
        if type(self.residual_bits) is not int or self.residual_bits not in (8, 32):
            raise ValueError(f"{_CALLER}: residual_bits must be 32 or 8, got {self.residual_bits!r}")
        _ = self.gathered_by  # checks it
        if type(self.seed) is not int:
            raise TypeError(f"{_CALLER}: seed must be an int, got {type(self.seed).__name__}")
        if type(self.start_step) is not int or self.start_step < 0:
            raise ValueError(f"{_CALLER}: start_step must be an int from 0 up, got {self.start_step!r}")
