"""The part of each training step that a plan can change: from the forward's begin until gradients are ready.

It lasts from the moment at which the last rank begins until the last one has its gradients. Ranks have clocks of their
own, which are set by a small collective: all ranks leave it at about the same time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ...communication.clocks import clock_of
from ...frontends.checks.hooks import ModelHook

Span = tuple[float, float]
"""The seconds of a begin and an end since the ranks have met."""


class StepSpans:
    """The spans of a training's steps on this rank.

    A span begins with the last forward that can have a backward, and ends when gradients are averaged. Whatever a
    training does between two steps, such as an evaluation or another model, is in none. If the model is not called by
    its own ``forward``, a span begins where the one before has ended.

    Args:
        model: the model, which keeps a hook.
        group: all ranks.
        device: the device of the gradients.
    """

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._model, self._clock = weakref.ref(model), clock_of(device)
        self._group, self._device = group, device
        self._met: Any = None
        self._marks: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._ended: Any = None
        self._handle: RemovableHandle | None = None
        self.open()

    def open(self) -> None:
        """Begin to watch the model. Further calls do nothing."""
        if self._handle is None and (model := self._model()) is not None:
            self._handle = model.register_forward_pre_hook(ModelHook(self._begin))

    def close(self) -> None:
        """Remove the hook. Further calls do nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def meet(self) -> None:
        """Forget the steps so far, and let all ranks count seconds from now on. Collective; no host waits for a GPU."""
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self._device), group=self._group)
        self._met, self._marks = self._clock.mark(), []

    def forget(self) -> None:
        """Forget the steps so far."""
        self._marks = []

    def end_step(self, counts: bool = True) -> None:
        """Note that the gradients of a step have been averaged just now.

        Args:
            counts: whether the step is among :meth:`taken`. All ranks give the same.
        """
        begun, ended = self._begun or self._ended, self._clock.mark()
        self._begun, self._ended = None, ended
        if counts and begun is not None:
            self._marks.append((begun, ended))

    def taken(self, but: int = 0) -> list[Span]:
        """The spans of the steps since the ranks have met. On a GPU the host waits until all of them have ended.

        Args:
            but: the number of last steps that are left out, unless there are no more.
        """
        met = self._met
        assert met is not None
        marks = self._marks[: len(self._marks) - but] or self._marks
        return [(self._clock.seconds(met, begun), self._clock.seconds(met, ended)) for begun, ended in marks]

    def _begin(self, model: torch.nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            self._begun = self._clock.mark()


def bounds_of(spans: Sequence[Span]) -> list[float]:
    """The numbers of this rank's spans whose maxima over all ranks :func:`of_all_ranks` needs."""
    lengths = [end - begin for begin, end in spans]
    return [*(begin for begin, _ in spans), *(end for _, end in spans), *lengths, *(-each for each in lengths)]


def of_all_ranks(maxima: Sequence[float]) -> list[float]:
    """For each step the seconds from the last begin to the last end of all ranks.

    Clocks differ by what ranks need to leave a collective. So the result is no less than the shortest span of a rank,
    and no more than the longest one.

    Args:
        maxima: the largest of all ranks of each number of :func:`bounds_of`.
    """
    size = len(maxima) // 4
    columns = (maxima[at * size : (at + 1) * size] for at in range(4))
    return [min(max(end - begin, -shortest), longest) for begin, end, longest, shortest in zip(*columns, strict=True)]
