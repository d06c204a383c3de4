"""The journal of a training: its decisions, and samples of its steps."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch

from .decisions import Decision

WINDOW = 100
"""Steps between two samples."""
FIRST_WINDOW = 10
"""Steps between two samples during the first :data:`WINDOW` steps, so that a short training has samples, too."""


@dataclass(frozen=True)
class Sample:
    """Figures of the steps since the sample before.

    Attributes:
        step: the number of synchronised steps before it.
        step_s: the median time of a step on this rank, in seconds, from the end of one backward to that of the next.
        sent_nbytes: the mean number of bytes that this rank has sent in a step.
        residual_norm: the Euclidean norm of all residuals of this rank; 0 without any.
        error: the relative error of the gradients that was last observed; ``None`` if none was.
        plan_fingerprint: the fingerprint of the plan.
    """

    step: int
    step_s: float
    sent_nbytes: float
    residual_norm: float
    error: float | None
    plan_fingerprint: str


class Journal:
    """The decisions of a training, and samples of its steps.

    Attributes:
        decisions: all decisions, oldest first.
        step: the number of synchronised steps that have ended.
        error: the relative error of the gradients that was last observed; ``None`` if none was.
    """

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.step = 0
        self.error: float | None = None
        self._samples: list[Sample] = []
        self._squares: list[torch.Tensor | None] = []  # norms of the last samples, squared, which are not there yet
        self._ended_s: float | None = None
        self._step_s: list[float] = []
        self._sent_nbytes: list[float] = []

    @property
    def step_s(self) -> float | None:
        """The median time of the steps since the last sample, else the last sample's median; ``None`` before both."""
        if self._step_s:
            return statistics.median(self._step_s)
        return self._samples[-1].step_s if self._samples else None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, oldest first. Waits for the devices if norms are still on them."""
        for at, square in enumerate(self._squares, start=len(self._samples) - len(self._squares)):
            if square is not None:
                self._samples[at] = replace(self._samples[at], residual_norm=float(square) ** 0.5)
        self._squares.clear()
        return tuple(self._samples)

    def end_step(self, sent_nbytes: float) -> bool:
        """Note the end of a synchronised step, and return whether a sample is due.

        Args:
            sent_nbytes: the bytes that this rank has sent in it.
        """
        now_s = time.perf_counter()
        if self._ended_s is not None:
            self._step_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        self._sent_nbytes.append(sent_nbytes)
        self.step += 1
        is_round = self.step % (FIRST_WINDOW if self.step <= WINDOW else WINDOW) == 0
        return is_round and bool(self._step_s)  # a job that has just been continued has no time yet

    def sample(self, square: torch.Tensor | None, plan_fingerprint: str) -> None:
        """Add a sample of the steps since the last one. One is due.

        Args:
            square: the square of the residuals' norm; ``None`` without residuals.
        """
        sent_nbytes = statistics.fmean(self._sent_nbytes)
        step_s = statistics.median(self._step_s)
        self._samples.append(Sample(self.step, step_s, sent_nbytes, 0.0, self.error, plan_fingerprint))
        self._squares.append(square)
        self._step_s.clear()
        self._sent_nbytes.clear()

    # ---------------------------------------------------------------- checkpoints

    def to_text(self) -> str:
        """The steps, decisions and samples as JSON. Waits for the devices if norms are still on them."""
        decisions, samples = [asdict(each) for each in self.decisions], [asdict(each) for each in self.samples]
        return json.dumps({"step": self.step, "error": self.error, "decisions": decisions, "samples": samples})

    @staticmethod
    def from_text(text: str) -> Journal:
        """The journal that :meth:`to_text` has written, which the next step continues.

        Raises:
            ValueError: it is damaged.
        """
        journal = Journal()
        try:
            record = json.loads(text)
            journal.step, error = _count(record["step"]), record["error"]
            journal.error = None if error is None else float(error)
            journal.decisions = [Decision(**each) for each in record["decisions"]]
            journal._samples = [Sample(**each) for each in record["samples"]]
            for sample in journal._samples:
                _count(sample.step), float(sample.step_s), float(sample.sent_nbytes), float(sample.residual_norm)
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"state: journal is not valid: {problem!r}") from problem
        return journal


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"step must be an int from 0 up, got {value!r}")
    return value
