"""Copies of the residuals from before a step, for steps that do not count, and the scale of a gradient scaler.

A step whose gradients are not used has sent a part of the residuals, and has added the error of a gradient that does
not count. A gradient scaler skips such steps, and a training may discard others. So every step keeps a copy of the
residuals from before it, and after a step that does not count the copy is restored.

A scaler multiplies gradients by its scale, and so residuals and factors. When the scale changes, they are multiplied by
the ratio of the new scale to the old one.

All of this happens when the next step begins, before anything is encoded, and on the device. The host does not know the
scale, and knows only in some cases that a scaler has not skipped a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gckernels.devices import is_accelerator, used_here

from ..plans.plan import Plan
from ..programs.residuals import ENCODINGS
from ..programs.steps import Place
from ..resources.feedback import Feedback
from ..resources.residual import Residual, multiply
from ..resources.workers import Work


class StepCopies:
    """The residuals of a rank as they were before the last step, and the scale of the present ones.

    Args:
        scaler: the gradient scaler of the training; ``None`` if there is none.
        feedback: the residuals and factors. After the first :meth:`begin` they are those of scaled gradients.
        plan: the plan of the training.
        parameters: the parameters of the plan, by name.
        device: the device of the gradients.
    """

    def __init__(
        self,
        scaler: GradScaler | None,
        feedback: Feedback,
        plan: Plan,
        parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
    ) -> None:
        self._scaler, self._feedback, self._device = scaler, feedback, device
        # by id: a reference would keep the model alive
        self._units: dict[int, list[str]] = {}
        for unit in plan.units:
            for name in unit.parameters if scaler is not None else ():
                self._units.setdefault(id(parameters[name]), []).append(unit.key)
        self._scale = torch.ones((), dtype=torch.float32, device=device)  # scale of the residuals
        self._copies: dict[tuple[str, str], _Copy] = {}  # by kind and unit, from before the last step
        self._follows_step = False  # the last step had residuals, and may have been skipped or discarded
        self._discarded: torch.Tensor | None = None  # true, if it has been discarded
        self._thrown: set[str] = set()  # units for which it does not count
        # units in optimizer steps since the last begin: a tensor that is not zero if the step is skipped, or None
        self._made: dict[str, torch.Tensor | None] = {}
        self._of_optimizers: weakref.WeakKeyDictionary[Any, tuple[int, list[str]]] = weakref.WeakKeyDictionary()
        weak = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (copies := weak()) is not None:
                copies._note(optimizer)

        self._watch = None if scaler is None else register_optimizer_step_pre_hook(note)

    # ---------------------------------------------------------------- optimizer steps

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's ``step`` was called.

        A fused optimizer is called also in a skipped step; its tensor ``found_inf`` tells it to skip.
        """
        skips = getattr(optimizer, "found_inf", None)
        self._made.update(dict.fromkeys(self._units_of(optimizer), skips))

    def _units_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The keys of the units that ``optimizer`` updates; computed again when its number of parameters changes."""
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._of_optimizers.get(optimizer)
        if known is None or known[0] != number:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            units = [key for parameter in parameters for key in self._units.get(id(parameter), ())]
            known = self._of_optimizers[optimizer] = (number, units)
        return known[1]

    def discard(self) -> None:
        """Let the last step not count: the next one begins with the residuals from before it. A step that has left
        residuals alone needs no such thing."""
        if self._follows_step:
            self._discarded = torch.ones((), dtype=torch.bool, device=self._device)

    def throw_away(self, keys: Collection[str]) -> None:
        """Let the last step not count for the residuals of some units."""
        if self._follows_step:
            self._thrown.update(keys)

    # ---------------------------------------------------------------- begin of a step

    @torch.no_grad()
    def begin(self, has_residuals: bool = True) -> list[tuple[Place, Work]]:
        """The work to do, and where, before the step that now begins encodes anything.

        The scale is read now, on the current stream.

        Args:
            has_residuals: whether the step may change residuals.
        """
        scale, skipped_of = self._read_scale()
        groups: dict[Any, list[tuple[Residual, _Copy, torch.Tensor | None]]] = {}
        for kind, name, residual in self._feedback.items():
            tensor = residual.tensor
            if (kind, name) not in self._copies:  # new in the last step, when it began with zeros, or loaded
                self._copies[kind, name] = _Copy(residual.with_tensor(torch.zeros_like(tensor)), self._scale)
            copy, skipped = self._copies[kind, name], skipped_of(kind, name)
            copy.residual.change(tensor.device, residual.form)  # a loaded one gets its form when it is encoded
            alike = id(skipped), id(copy.scale), tensor.dtype, tensor.device
            groups.setdefault(alike, []).append((residual, copy, skipped))
        renewals = []
        for (*_, memory), members in groups.items():
            _, before, skipped = members[0]
            origin = self._scale if skipped is None else torch.where(skipped, before.scale, self._scale)
            for _, copy, _ in members:
                copy.scale = origin
            renewal = _Renewal(
                [residual for residual, *_ in members],
                [copy.residual.tensor for _, copy, _ in members],
                None if skipped is None else _to_memory(skipped, memory),
                None if self._scaler is None else _to_memory(scale / origin, memory),
            )
            renewals.append((Place.DEVICE if memory.type == self._device.type else Place.HOST, renewal))
        self._scale, self._follows_step, self._discarded, self._made = scale, has_residuals, None, {}
        self._thrown.clear()
        return [(place, renewal.run) for place, renewal in renewals]

    def _read_scale(self) -> tuple[torch.Tensor, Callable[[str, str], torch.Tensor | None]]:
        """The current scale, and a function from the kind of a residual or factor and the key of its unit to whether
        the last step does not count for it.

        The function returns a bool tensor, or ``None`` if the step certainly counts. For a unit that was in no
        optimizer step, a lower scale than before means that the step was skipped.
        """
        thrown = torch.ones((), dtype=torch.bool, device=self._device) if self._thrown else None
        keys = set(self._thrown)

        def thrown_of(kind: str, name: str) -> torch.Tensor | None:
            return thrown if name in keys and kind in ENCODINGS else self._discarded

        if self._scaler is None:
            return self._scale, thrown_of
        scale = self._scaler._get_scale_async()
        if scale is None:  # no loss has been scaled
            scale = self._scale
        # a copy: the scaler changes its own in place
        scale = scale.detach().to(self._device, torch.float32, non_blocking=True, copy=True)
        decreased = scale < self._scale
        found_inf = {id(skips): skips.to(self._device) > 0 for skips in self._made.values() if skips is not None}

        def skipped_of(kind: str, name: str) -> torch.Tensor | None:
            if (skipped := thrown_of(kind, name)) is not None or not self._follows_step:
                return skipped
            return found_inf.get(id(self._made[name])) if name in self._made else decreased

        # a scale of zero has scaled no gradient, and would erase the residuals
        return torch.where(scale.isfinite() & (scale > 0), scale, self._scale), skipped_of

    # ---------------------------------------------------------------- states

    @torch.no_grad()
    def unscale(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Convert a state of scaled gradients, in place, to one of gradients that are not scaled.

        If the last step does not count, its effect is undone.

        Args:
            state: what :meth:`~gckernels.sync.resources.feedback.Feedback.state_dict` returned, on any device.
        """
        _, skipped_of = self._read_scale()
        for kind, tensors in state.items():
            for name, values in tensors.items():
                skipped, memory = skipped_of(kind, name), values.device
                values.div_(self._scale.to(memory))
                if skipped is not None:
                    copy = self._copies.get((kind, name))
                    before = torch.zeros_like(values)
                    if copy is not None:
                        before = copy.residual.values().to(memory) / copy.scale.to(memory)
                    values.copy_(torch.where(skipped.to(memory), before, values))

    def reset(self) -> None:
        """Forget scale and copies, because the residuals have been loaded: those of a state are not scaled."""
        self._scale = torch.ones_like(self._scale)
        self._follows_step, self._discarded = False, None
        self._thrown.clear()
        self._copies.clear()

    def copy(self, kind: str, key: str) -> torch.Tensor | None:
        """The values of a residual or factor as they were before the last step; ``None`` if it did not exist."""
        copy = self._copies.get((kind, key))
        return None if copy is None else copy.residual.values()

    def nbytes(self) -> int:
        """Bytes of all copies on this rank."""
        return sum(copy.residual.tensor.nbytes for copy in self._copies.values())

    def close(self) -> None:
        """Stop watching optimizers."""
        if self._watch is not None:
            self._watch.remove()


@dataclass
class _Copy:
    """A residual as it was before a step, and its scale then.

    It keeps the old scale. If the residual overflows at the new one, the step is skipped like any other with inf, and
    the copy is still finite.
    """

    residual: Residual
    scale: torch.Tensor


@dataclass(frozen=True)
class _Renewal:
    """The work before a step on residuals of one dtype in one memory that have the same scale and optimizer."""

    residuals: list[Residual]
    copies: list[torch.Tensor]  # their tensors before the last step
    skipped: torch.Tensor | None  # whether the last step does not count, a bool scalar; None if it certainly counts
    factor: torch.Tensor | None  # ratio of the new scale to that of the values, an fp32 scalar; None without a scaler

    @torch.no_grad()
    def run(self) -> None:
        """Restore the copies if the step does not count, copy the residuals, multiply them by ``factor``.

        A factor that is a power of two, as those of torch's scaler are, changes no bits of the result.
        """
        used_here(self.skipped, self.factor)
        tensors = [residual.tensor for residual in self.residuals]
        if self.skipped is not None:
            for tensor, copy in zip(tensors, self.copies, strict=True):
                torch.where(self.skipped, copy, tensor, out=tensor)
        torch._foreach_copy_(self.copies, tensors)
        if self.factor is not None:
            multiply(self.residuals, self.factor)


def _to_memory(value: torch.Tensor, memory: torch.device) -> torch.Tensor:
    """``value`` on the device ``memory``. The copy is asynchronous: the host must wait for the device to read it."""
    if value.device.type == memory.type:
        return value
    there = torch.empty_like(value, device=memory, pin_memory=is_accelerator(value.device))
    return there.copy_(value, non_blocking=True)
