"""Rounds of training steps, behind each of which updates are averaged in place of gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gckernels.compressor import Compressor
from gckernels.sync.plans.numbers import plural
from gckernels.sync.traces.model_trace import ModelTrace


def is_mean(method: Compressor) -> bool:
    """Whether the result of a compressor is the mean of what it is given, as ``sync.Updates`` needs it."""
    return method.traits.averages and not method.traits.applies_momentum


@dataclass(frozen=True)
class UpdateRounds:
    """Rounds of ``sync.Updates``.

    Raises:
        ValueError: a number is not valid.
    """

    step: ModelTrace  # the trace of a training step
    every: int  # the number of steps of a round, from 1 up
    delay: int = 0
    """The number of steps of the next round that are computed while updates are on their way, from 0 to ``every``."""

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every: must be an integer from 1 up, got {self.every!r}")
        if type(self.delay) is not int or not 0 <= self.delay <= self.every:
            raise ValueError(f"delay: must be an integer from 0 to every, {self.every}, got {self.delay!r}")

    @property
    def trace(self) -> ModelTrace:
        """The trace of a round, as if it were one step of a bare module.

        All updates are ready when its backward begins, which is the computing of the steps of the delay. Its forward
        and its optimizer are those of the other steps. Updates have at least 32 bits, as anchors have.
        """
        step, others = self.step, self.every - self.delay
        delayed = f" with a delay of {self.delay}" if self.delay else ""
        updates = (
            replace(each, ready_s=0.0, dtype=torch.promote_types(each.dtype, torch.float32)) for each in step.tensors
        )
        return replace(
            step,
            model=f"{step.model}, rounds of {plural(self.every, 'step')}{delayed}",
            tensors=tuple(updates),
            forward_s=others * (step.forward_s + step.backward_s),
            backward_s=self.delay * step.computing_s,
            optimizer_s=others * step.optimizer_s,
            buckets=(),
            copies_gradients=False,
            gathers=(),
        )
