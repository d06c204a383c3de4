"""The monitor: measures the steps of a training, and lets the ranks agree on them in one small collective a window.

Ranks count steps alike, because a step ends for all of them at the end of the same backward. So they come to the
collective together, and all of them get the same window. No step waits for its answer, whatever the latency of the
link: it is read a step later, or on a CUDA device :data:`ANSWER_STEPS` steps later, which all ranks count as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gckernels.devices import current_stream, event_behind, is_accelerator

from ...communication.ranks import Ranks
from ...resources.error_probe import ProbeSchedule, Readings
from ..trials.spans import StepSpans, bounds_of, of_all_ranks
from .guard import Reading
from .pace import WINDOW

ANSWER_STEPS = 10
"""Steps after which the host reads what a device has been asked for."""
READ_EVERY = 4
"""Windows of which the last one has readings, and at whose end the ranks set their clocks again."""


@dataclass(frozen=True)
class Window:
    """Some consecutive steps, as all ranks see them."""

    steps: int  # their number
    steps_s: tuple[float, ...]  # the spans of the steps that were measured, in seconds
    error: float = 0.0  # the relative error of all units together, on the rank where it is largest; 0 without readings
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """The readings of each unit in one of the steps, by its key, each number from the rank where it is largest. Units
    without a gradient are missing."""

    @property
    def step_s(self) -> float:
        """The median span of a step in seconds."""
        return statistics.median(self.steps_s)


@dataclass
class _Question:
    """A collective whose answer is still to be read."""

    due: int  # number of the step after which it is read
    keys: tuple[str, ...]  # the units in it
    answer: torch.Tensor  # the answer, in the memory of the host
    is_there: torch.Event | None = None  # the event after which it is there; None if it is
    readings: Readings | None = None  # not to be freed before, because other streams have made them
    work: dist.Work | None = None  # the collective; None if it has ended


class Monitor:
    """Measures steps and residuals while a plan runs. All ranks make one, and call its methods, after the same steps.

    Args:
        ranks: all ranks.
        spans: marks the spans of the steps.
        watch: the readings of compression; ``None`` if nothing is compressed.
        keys: the units to read, in the same order on all ranks.
        low_rank: the units of low-rank methods among them.
        window: steps of a window.
    """

    def __init__(
        self,
        ranks: Ranks,
        spans: StepSpans,
        watch: ProbeSchedule | None = None,
        keys: tuple[str, ...] = (),
        low_rank: tuple[str, ...] = (),
        window: int = WINDOW,
    ) -> None:
        self._group, self._device, self._window = ranks.group, ranks.device, window
        self._watch, self._keys = watch, keys if watch is not None else ()
        self._low_rank = low_rank if watch is not None else ()
        self._answer_steps = ANSWER_STEPS if is_accelerator(ranks.device) else 0  # the last spans are not over yet
        self._spans, self._count = spans, 0
        spans.meet()
        self._question: _Question | None = None

    def step_ended(self) -> Window | None:
        """Note the end of a synchronised step, and return the window that is known now, if there is one.

        Raises:
            RuntimeError: the collective has failed, as with a rank that has died.
        """
        self._spans.end_step()
        window, at = divmod(self._count, self._window)  # the step is one of this window
        self._count += 1
        reads = window % READ_EVERY == READ_EVERY - 1
        if reads and at + 1 == self._window // 2 and self._keys and self._watch is not None:
            self._watch.ask()  # the norms are there long before they are sent
        if at + 1 == self._window:
            self._question = self._ask(reads)
        elif self._question is not None and self._count >= self._question.due:
            question, self._question = self._question, None
            return self._read(question)
        return None

    def _ask(self, reads: bool) -> _Question:
        """Send this rank's window, and begin the next one. The last steps of a device may not have ended yet, and do
        not count."""
        bounds = bounds_of(self._spans.taken(but=self._answer_steps))
        sent = torch.tensor(bounds, dtype=torch.float64, device="cpu").to(self._device, non_blocking=True)
        keys = self._keys if reads else ()
        readings = self._watch.take() if keys and self._watch is not None else None
        if keys:
            sent = torch.cat((sent, _ratios(self._norms(readings or Readings())).double()))
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if reads:
            self._spans.meet()
        else:
            self._spans.forget()
        if not is_accelerator(self._device):
            return _Question(self._count + 1, keys, sent, work=work)
        work.wait()  # the stream waits, the host does not
        answer = torch.empty(sent.shape, dtype=sent.dtype, device="cpu", pin_memory=True)
        answer.copy_(sent, non_blocking=True)
        is_there = event_behind(current_stream(self._device))
        return _Question(self._count + self._answer_steps, keys, answer, is_there, readings)

    def _norms(self, readings: Readings) -> torch.Tensor:
        """The norms of all units, ``[3, units]``: of this rank, and of the means of all ranks for low-rank methods.
        Collective if there are any of these."""
        norms = readings.norms(self._keys, self._device)
        if self._low_rank:
            sketches = readings.sketches(self._low_rank, self._device)
            dist.all_reduce(sketches, group=self._group)
            means = sketches.norm(dim=2).T / dist.get_world_size(self._group)
            norms[:, [self._keys.index(key) for key in self._low_rank]] = means
        return norms

    def _read(self, question: _Question) -> Window:
        if question.work is not None:
            question.work.wait()
        if question.is_there is not None:
            question.is_there.synchronize()
        answer = list(map(float, question.answer.tolist()))
        numbers = 2 * len(question.keys) + 1 if question.keys else 0
        maxima, ratios = answer[: len(answer) - numbers], answer[len(answer) - numbers :]
        error, *each = ratios or [0.0]
        readings = {
            key: Reading(error, residual)
            for key, error, residual in zip(question.keys, each[::2], each[1::2], strict=True)
            if error or residual
        }
        return Window(self._window, tuple(of_all_ranks(maxima)), error, readings)


def _ratios(norms: torch.Tensor) -> torch.Tensor:
    """The error of all units together, then the error and the relative residual of each, from norms ``[3, units]``.

    Both are 0 for a unit whose gradient is zero, or not finite, as in a step that a gradient scaler skips. Both are
    infinity if only the residual is not finite.
    """
    gradient, given, left = norms
    counts = gradient.isfinite() & (gradient > 0)
    ratios = torch.stack((left / given, left / gradient), dim=1).nan_to_num(nan=math.inf, posinf=math.inf)
    together = torch.where(counts, norms, torch.zeros_like(norms)).norm(dim=1)
    error = (together[2] / together[1]).nan_to_num(nan=0.0, posinf=0.0)
    return torch.cat((error[None], torch.where(counts[:, None], ratios, torch.zeros_like(ratios)).flatten()))
