"""Residuals under a gradient scaler, whose scale changes and which skips steps.

Gradients come multiplied by the scale, so residuals are, too, and all else that is remembered of them. When the scale
has changed they are multiplied by the ratio. And a step that the optimizer skips has given away a part of what the
residuals were before it, and put the gradient of a step that does not count into them; so they become what they were,
of which there is a copy.

All of this happens when the next step begins, before anything is encoded, and on the device: the host does not know
the scale, nor whether a step was skipped, unless it knows that the optimizer has made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..plans.plan import Plan
from ..programs.steps import Place
from ..resources.feedback import Feedback
from ..resources.workers import Work


class LossScale:
    """The effect of a gradient scaler on the residuals of a rank.

    Args:
        scaler: of the training.
        feedback: what is remembered. From the first :meth:`begin` on its residuals are in units of scaled gradients.
        plan: of the units.
        parameters: of the plan, by name.
        device: of the gradients.
    """

    def __init__(
        self,
        scaler: GradScaler,
        feedback: Feedback,
        plan: Plan,
        parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
    ) -> None:
        self._scaler, self._feedback, self._device = scaler, feedback, device
        # by number: a model must not live on because of this
        self._units: dict[int, list[str]] = {}
        for unit in plan.units:
            for name in unit.parameters:
                self._units.setdefault(id(parameters[name]), []).append(unit.key)
        self._scale = torch.ones((), device=device)  # of what is remembered
        self._copies: dict[tuple[str, str], _Copy] = {}  # of what was there before the last step
        self._follows_step = False
        self._made: dict[str, torch.Tensor | None] = {}  # units of steps that were made, and what says if they were
        self._in_use: Any = None  # by streams that may not have come to it; not to be freed before
        self._of_optimizers: weakref.WeakKeyDictionary[Any, tuple[int, list[str]]] = weakref.WeakKeyDictionary()
        weak = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            scale = weak()
            if scale is not None:
                scale._note(optimizer)

        self._watch = register_optimizer_step_pre_hook(note)

    # ---------------------------------------------------------------- what the optimizers do

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer makes a step. One that is fused is called in each, and told by a tensor whether to skip it."""
        skips = getattr(optimizer, "found_inf", None)
        self._made.update(dict.fromkeys(self._units_of(optimizer), skips))

    def _units_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._of_optimizers.get(optimizer)
        if known is None or known[0] != number:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            units = [key for parameter in parameters for key in self._units.get(id(parameter), ())]
            known = self._of_optimizers[optimizer] = (number, units)
        return known[1]

    # ---------------------------------------------------------------- a step begins

    @torch.no_grad()
    def begin(self) -> list[tuple[Place, Work]]:
        """The work that has to be done before anything is encoded in the step that begins, and where. The scale is read
        now, on the current stream."""
        scale, judge = self._look()
        groups: dict[Any, list[tuple[torch.Tensor, _Copy, torch.Tensor | None]]] = {}
        for kind, name, values in self._feedback.items():
            if (kind, name) not in self._copies:  # it has been made in the last step, of zeros, or loaded
                self._copies[kind, name] = _Copy(torch.zeros_like(values), self._scale)
            copy, skipped = self._copies[kind, name], judge(name)
            groups.setdefault((id(skipped), id(copy.scale), values.device), []).append((values, copy, skipped))
        renewals = []
        for (*_, memory), members in groups.items():
            _, before, skipped = members[0]
            origin = self._scale if skipped is None else torch.where(skipped, before.scale, self._scale)
            for _, copy, _ in members:
                copy.scale = origin
            renewal = _Renewal(
                [values for values, *_ in members],
                [copy.values for _, copy, _ in members],
                None if skipped is None else _moved(skipped, memory),
                _moved(scale / origin, memory),
            )
            renewals.append((Place.DEVICE if memory.type == self._device.type else Place.HOST, renewal))
        self._scale, self._follows_step, self._made = scale, True, {}
        self._in_use = renewals
        return [(place, renewal.run) for place, renewal in renewals]

    def _look(self) -> tuple[torch.Tensor, Callable[[str], torch.Tensor | None]]:
        """The scale, and what says of a unit, by its name, whether its last step was skipped: a tensor, or ``None`` if
        it was made. Where no optimizer has been seen to make it, the scale tells, which falls when a step is skipped.
        """
        shown = self._scaler._get_scale_async()
        if shown is None:  # no loss has been scaled
            shown = self._scale
        # a copy: the scaler changes its own in place
        shown = shown.detach().to(self._device, torch.float32, non_blocking=True, copy=True)
        fell = shown < self._scale
        told = {id(skips): skips.to(self._device) > 0 for skips in self._made.values() if skips is not None}

        def judge(name: str) -> torch.Tensor | None:
            if not self._follows_step:
                return None
            return told.get(id(self._made[name])) if name in self._made else fell

        # one that has fallen to zero scales no gradient, and would leave nothing
        return torch.where(shown.isfinite() & (shown > 0), shown, self._scale), judge

    # ---------------------------------------------------------------- states

    @torch.no_grad()
    def unscale(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Let a state of :class:`~.feedback.Feedback`, in place and in any memory, be of gradients that are not scaled,
        and be without what the last step did if that has been skipped."""
        _, judge = self._look()
        for kind, remembered in state.items():
            for name, values in remembered.items():
                skipped, memory = judge(name), values.device
                values.div_(self._scale.to(memory))
                if skipped is not None:
                    copy = self._copies.get((kind, name), _Copy(torch.zeros_like(values), self._scale))
                    values.copy_(
                        torch.where(skipped.to(memory), copy.values.to(memory) / copy.scale.to(memory), values)
                    )

    def reset(self) -> None:
        """The residuals have become those of a state, whose gradients are not scaled."""
        self._scale = torch.ones_like(self._scale)
        self._follows_step = False
        self._copies.clear()

    def nbytes(self) -> int:
        """Bytes that the copies take on this rank."""
        return sum(copy.values.nbytes for copy in self._copies.values())

    def close(self) -> None:
        """Watch no optimizers any more."""
        self._watch.remove()


@dataclass
class _Copy:
    """A residual as it was before a step, and its scale. It is not brought to the scale of the step: where that is more
    than fp32 can hold, the step is skipped like any other with inf, and the copy is good still."""

    values: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class _Renewal:
    """Residuals in one memory, of which all or none were in a step that was skipped.

    Attributes:
        values: the residuals.
        copies: what they were before that step.
        skipped: bool, of no dimensions; ``None`` where it is known that the step was made.
        factor: fp32, of no dimensions: what brings those that count to the present scale.
    """

    values: list[torch.Tensor]
    copies: list[torch.Tensor]
    skipped: torch.Tensor | None
    factor: torch.Tensor

    @torch.no_grad()
    def run(self) -> None:
        """Take back those of a skipped step, copy all, and bring them to the present scale; powers of two are exact."""
        if self.skipped is not None:
            for values, copy in zip(self.values, self.copies, strict=True):
                torch.where(self.skipped, copy, values, out=values)
        torch._foreach_copy_(self.copies, self.values)
        torch._foreach_mul_(self.values, self.factor)


def _moved(value: torch.Tensor, memory: torch.device) -> torch.Tensor:
    """In that memory, too; a host may read it when the device has come to it."""
    if value.device.type == memory.type:
        return value
    there = torch.empty_like(value, device=memory, pin_memory=value.is_cuda)
    return there.copy_(value, non_blocking=True)
