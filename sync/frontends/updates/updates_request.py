"""The settings of ``sync.Updates``, and their checks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import BlockQuant, Identity

from ...plans.plan import Plan
from ..checks.models import refuse_several_devices, refuse_sharded, refuse_without_shape, refuse_without_values
from ..checks.optimizer_checks import hooked, normalises
from ..members import listed, refuse_unknown
from ..module.module_checks import frozen_lines, planned_of
from ..ownership import refuse_claimed, refuse_wrapped
from ..request import Request
from ..silence import Silence
from .round_buffers import RoundBuffers
from .schedule import Schedule
from .site_parameters import own_parameters, shard_lines, values_of
from .step_scales import StepScales

Outer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""A function that makes an optimizer of parameters."""
PLAIN_MEAN: Outer = functools.partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer that adds the mean of the updates to the anchors."""
_CALLER = "attach"
_OF_GRADIENTS = ("memory_budget_mb", "can_discard", "weights")
_OPTIONS_OF_GRADIENTS = ("bucket_cap_mb", "find_unused_parameters")
"""The settings of a request, and those of its options, that are for gradients alone."""
SCALED_ROUND = 4
"""The number of steps of a round up to which factors of steps make up for what exact updates lose
(``bench/training/updates.py``)."""


@dataclass(frozen=True, kw_only=True)
class UpdatesRequest(Request):
    """The settings of ``sync.Updates``, which documents them, beside the arguments of ``attach``.

    Attributes:
        silence: what averages the gradients of the model over the ranks that average updates, and does not meanwhile;
            ``None`` if nothing does.
    """

    argument: ClassVar[str] = "Updates: plan"
    others: ClassVar[str] = "a Plan, an Auto"

    given_optimizers: Sequence[Any]
    schedule: Schedule
    mixing: float | None
    outer: Outer
    anchor_device: torch.device | str | None
    scalers: Sequence[GradScaler]
    scale_steps: bool | None
    silence: Silence | None

    @property
    def compresses_from(self) -> int:
        """The first synchronisation that may be compressed. Rounds of one step come before it, also where a compressor
        is found."""
        return self.start_step

    @functools.cached_property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, as far as their steps call hooks.

        Raises:
            TypeError: one is none, or calls no hooks.
        """
        if any(each is None for each in self.given_optimizers):
            raise TypeError(
                "Updates: optimizer must be given, as an optimizer or a list of them, got None; only the integrations "
                "of trainers find the optimizers themselves"
            )
        return [hooked("Updates", each) for each in self.given_optimizers]

    def check(self, parameters: dict[str, torch.nn.Parameter]) -> str:
        """A summary of the settings, which must be the same on all ranks.

        Args:
            parameters: the parameters of the model, by name.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        schedule, mixing, decay = self.schedule, self.mixing, self.decay
        self._check_optimizers(parameters)
        schedule.check()
        if not (mixing is None or (isinstance(mixing, int | float) and 0 <= mixing <= 1)):
            raise ValueError(f"Updates: mixing must be None or a number from 0 to 1, got {mixing!r}")
        if mixing is not None and not schedule.delay:
            raise ValueError("Updates: mixing is for parameters that change in a delay, and delay is 0")
        if not (self.scale_steps is None or type(self.scale_steps) is bool):
            raise TypeError(f"Updates: scale_steps must be None, True or False, got {self.scale_steps!r}")
        if not (decay is None or (isinstance(decay, int | float) and 0 <= decay <= 1)):
            raise ValueError(f"Updates: decay must be None or a number from 0 to 1, got {decay!r}")
        _ = self.anchors_on  # checks it
        probe = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=self.device))
        made: Any = self.outer([probe]) if callable(self.outer) else self.outer
        if not isinstance(made, torch.optim.Optimizer) or made is self.outer:
            raise TypeError(
                "Updates: outer must be None or a function that makes a torch.optim.Optimizer of parameters, "
                f"such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), got "
                f"{type(self.outer if made is self.outer else made).__name__}"
            )
        settings = f"{schedule}, mixing {mixing}, decay {decay}, scale_steps {self.scale_steps}"
        return f"{settings}, outer {' '.join(repr(made).split())}"

    def check_settings(self) -> None:
        super().check_settings()
        for given, names in ((self, _OF_GRADIENTS), (self.options, _OPTIONS_OF_GRADIENTS)):
            for name in names:
                value, default = getattr(given, name), getattr(type(given), name)
                if value is not default:
                    raise ValueError(f"{_CALLER}: {name} must be {default} with Updates, got {value!r}")
        for scaler in self.scalers:
            if not isinstance(scaler, GradScaler):
                got = type(scaler).__name__
                raise TypeError(
                    f"{_CALLER}: grad_scaler must be a torch.amp.GradScaler, a list of these or None, got {got}"
                )

    @property
    def anchors_on(self) -> torch.device | None:
        """The device of the anchors; ``None`` for the model's.

        Raises:
            ValueError: there is none of that name.
        """
        try:
            return None if self.anchor_device is None else torch.device(self.anchor_device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"Updates: anchor_device must be None or a device such as 'cpu', got {self.anchor_device!r}"
            ) from error

    def _check_optimizers(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Raise unless every optimizer has parameters of the model, and warn of parameters that none has."""
        ids, stepped = {id(each) for each in parameters.values()}, set[int]()
        if not self.optimizers or len({id(each) for each in self.optimizers}) < len(self.optimizers):
            raise ValueError(f"Updates: optimizer must be one or a list of different ones, got {self.optimizers}")
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            if name == "ZeroRedundancyOptimizer":
                raise TypeError(f"Updates: optimizer must step all parameters on every rank, got {name}")
            own = {id(each) for group in optimizer.param_groups for each in group["params"]}
            if own.isdisjoint(ids):
                raise ValueError(f"Updates: optimizer must have parameters of the model, and {name} has none")
            stepped |= own
        if left := [name for name, each in parameters.items() if each.requires_grad and id(each) not in stepped]:
            warnings.warn(
                f"Updates: no optimizer was given that has {listed(left)}; give a list of all optimizers, freeze "
                "what none steps, or name it in exclude. What else changes it must do so before the last optimizer of "
                "a step",
                stacklevel=2,
            )

    def scales(self, before: StepScales | None) -> StepScales | None:
        """The factors of steps with a plan, those from before if there are any; ``None`` if steps have none."""
        if not (scaled := [each for each in self.optimizers if self._with_scales(each)]):
            return None
        return before or StepScales(scaled, self.group, self.device)

    def _with_scales(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether steps of an optimizer get factors. By default those of an outer optimizer and of long rounds are left
        as they are, because published algorithms have none, and ranks would only drift further apart."""
        if self.scale_steps is not None:
            return self.scale_steps
        return normalises(optimizer) and self.outer is PLAIN_MEAN and self.schedule.has_rounds_of(SCALED_ROUND)

    def for_vectors(self, compressor: Compressor) -> Compressor:
        """The quantiser of vectors beside codecs of fewer bits. Exact vectors would take a sixth of what half a bit per
        element takes, and the error of eight bits is small, as updates of an element are about as long as the
        learning rate."""
        is_small = isinstance(compressor, Codec) and compressor != Identity() and not compressor.traits.summable
        return BlockQuant() if is_small else Identity()

    def refuse_averaged(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Raise a ValueError if DistributedDataParallel averages gradients over all ranks that average updates."""
        advice = (
            "over all ranks that average updates; give that model, which then averages no gradients, or the module "
            "without a wrapper, or let DistributedDataParallel average inside a site alone"
        )
        if len(ranks := dist.get_process_group_ranks(self.group)) > 1:
            silent = None if self.silence is None else self.silence.averages
            refuse_wrapped(_CALLER, parameters, advice, ranks, but=silent)


def checked_plan(model: torch.nn.Module, request: Request) -> tuple[Plan, list[str]]:
    """The plan of a request for a model, and the texts that must be the same on all ranks."""
    assert isinstance(request, UpdatesRequest)
    refuse_sharded(_CALLER, model)
    refuse_unknown(_CALLER, model, request.options.exclude)
    parameters = own_parameters(model, request.left_out)
    if not parameters:
        raise ValueError(f"{_CALLER}: model has no parameters that can have a gradient")
    refuse_without_shape(_CALLER, parameters)
    refuse_without_values(_CALLER, parameters)
    refuse_several_devices(_CALLER, parameters)
    refuse_claimed(_CALLER, parameters)
    if request.silence is not None:
        request.silence.check(_CALLER)
    request.refuse_averaged(parameters)
    plan, lines = fitting(request, parameters)
    return plan, [*lines, *RoundBuffers(model, request.left_out, request.device).lines]


def fitting(request: Request, parameters: dict[str, torch.nn.Parameter]) -> tuple[Plan, list[str]]:
    """The plan of a request for some parameters, and the texts that must be the same on all ranks."""
    assert isinstance(request, UpdatesRequest)
    settings = request.check(parameters)
    shards = shard_lines(_CALLER, parameters, request.group, has_replicas=request.silence is not None)
    values = {name: torch.nn.Parameter(values_of(each), each.requires_grad) for name, each in parameters.items()}
    plan, summary = request.checked(planned_of(request.plan, values))
    for unit in plan.units:
        if not unit.compressor.traits.averages or unit.compressor.traits.applies_momentum:
            raise ValueError(
                f"Updates: plan must have compressors whose result is the mean of what they are given, got "
                f"{unit.compressor} for {unit.key}"
            )
    return plan, [f"{summary}, {settings}", *shards, *plan.lines(), *frozen_lines(parameters)]
