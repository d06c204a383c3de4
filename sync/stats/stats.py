"""Figures of a training with a plan: decisions, samples, a traced step, and a dict for dashboards."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..engine.recorded_step import RecordedStep
from ..engine.runtime import Runtime
from ..plans.names import summary_of
from ..plans.numbers import duration, plural, volume
from ..plans.plan import Plan
from ..programs.sizes import allreduce_sent_nbytes
from .decisions import Decision, log
from .history import WINDOW, Journal, Sample

FINGERPRINT_CHARS = 12
"""Characters of a fingerprint that people see."""


@dataclass(frozen=True)
class Overlap:
    """The overlap of backward and communication in a step.

    Attributes:
        hidden_s: seconds of communication during backward.
        exposed_s: seconds of waiting after backward.
    """

    hidden_s: float
    exposed_s: float


class Figures:
    """Figures of a training, for ``Attachment`` and ``Synchronizer``."""

    plan: Plan
    _runtime: Runtime
    _averaged_nbytes: int
    """The bytes of all gradients of a rank."""
    _fingerprinted: tuple[Plan, str] | None = None

    @functools.cached_property
    def _journal(self) -> Journal:
        return Journal()

    # ---------------------------------------------------------------- decisions

    def decide(self, decision: Decision) -> None:
        """Log a decision, and add it to :attr:`decisions`. Communicates nothing."""
        self._journal.decisions.append(decision)
        log(decision, self._runtime.rank)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions about the plan so far, oldest first."""
        return tuple(self._journal.decisions)

    # ---------------------------------------------------------------- steps

    @property
    def steps(self) -> int:
        """The number of synchronised steps, with those of the job that was continued from a checkpoint; while a plan
        compresses nothing under DDP, only steps with listeners count."""
        return self._journal.step

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Figures of this rank's steps, oldest first: one sample every 100 steps, and every 10 during the first 100."""
        return self._journal.samples

    def note_error(self, error: float) -> None:
        """Let samples and :meth:`stats` have ``error`` as the relative error of the gradients, until the next call."""
        self._journal.error = error

    def trace_next_step(self) -> None:
        """Record the stages of the next step on this rank, for :attr:`recorded_step`."""
        self._runtime.tracer.ask()

    @property
    def recorded_step(self) -> RecordedStep | None:
        """The last recorded step of this rank that has ended. Every hundredth step is recorded, the first one of a plan
        that follows another, and those that :meth:`trace_next_step` asks for; ``None`` before the first. Steps that DDP
        averages without a hook have no stages, and are not recorded. Its ``plan_fingerprint`` says whether the plan
        that runs now has made it."""
        return self._runtime.tracer.last

    def _on_step_end(self) -> None:
        """Note the end of a synchronised step. Called on every rank, and communicates nothing."""
        journal, sent_nbytes = self._journal, self._runtime.last_sent_nbytes
        is_due = journal.end_step(self._plain_nbytes() if sent_nbytes is None else sent_nbytes)
        if is_due:
            journal.sample(self._residual_square(), self._fingerprint())
            if journal.step % WINDOW == 0 or journal.step == WINDOW // 10:
                self.trace_next_step()

    def _residual_square(self) -> torch.Tensor | None:
        """The square of the norm of all residuals of this rank, on its device; ``None`` without residuals."""
        residuals = self._runtime.residuals()
        if not residuals:
            return None
        squares = [torch.linalg.vector_norm(each).square().to(self._runtime.device) for each in residuals]
        return torch.stack(squares).sum()

    # ---------------------------------------------------------------- for dashboards

    def stats(self) -> dict[str, float | int | str]:
        """The figures of this rank as a flat dict, which TensorBoard and Weights & Biases take. A figure that is not
        known yet is left out. Communicates nothing; on a device it waits for the last sample.

        - ``step``: synchronised steps, with those before a checkpoint; ``world_size``: ranks
        - ``plan``: the fingerprint of the plan that runs; ``policy``: the policy that has found it; ``units`` and
          ``compressed_units``: units of the plan, and those that are compressed
        - ``step_s``: the median time of the last steps; ``predicted_s``: that of the plan's prediction;
          ``plain_s`` and ``speedup``: the measured or predicted step without compression, and how many times as fast
          the step is now
        - ``sent_nbytes``, ``plain_nbytes``, ``saved_nbytes``: bytes that this rank sends in a compressed step, would
          send without compression, and does not send
        - ``hidden_s``, ``exposed_s``: seconds of communication during backward, and of waiting after it, in the last
          traced step of this plan; without a hook, in the last step that DDP has timed
        - ``residual_norm``, ``residual_nbytes``: norm of all residuals at the last sample, and their memory
        - ``error``: relative error of the gradients, observed, or else predicted
        - ``decisions``: how many there were
        """
        journal, plan = self._journal, self.plan
        prediction, plain_nbytes = plan.prediction, self._plain_nbytes()
        sent_nbytes = self._sent_nbytes()
        plain_s = next((each.none_s for each in reversed(journal.decisions) if each.none_s is not None), None)
        if plain_s is None and prediction is not None:
            plain_s = prediction.none_s
        samples, overlap = journal.samples, self._overlap()
        known: dict[str, float | int | str | None] = {
            "step": journal.step,
            "world_size": self._runtime.world_size,
            "plan": self._fingerprint()[:FINGERPRINT_CHARS],
            "policy": self._policy(),
            "units": len(plan.units),
            "compressed_units": sum(not unit.in_place for unit in plan.units),
            "step_s": journal.step_s,
            "predicted_s": None if prediction is None else prediction.step_s,
            "plain_s": plain_s,
            "speedup": plain_s / journal.step_s if plain_s and journal.step_s else None,
            "sent_nbytes": sent_nbytes,
            "plain_nbytes": plain_nbytes,
            "saved_nbytes": plain_nbytes - sent_nbytes,
            "hidden_s": None if overlap is None else overlap.hidden_s,
            "exposed_s": None if overlap is None else overlap.exposed_s,
            "residual_norm": samples[-1].residual_norm if samples else None,
            "residual_nbytes": self._runtime.residual_nbytes(),
            "error": _first(journal.error, None if prediction is None else prediction.error),
            "decisions": len(journal.decisions),
        }
        return {name: value for name, value in known.items() if value is not None}

    def __repr__(self) -> str:
        """The way of the next step and the last figures in one line, such as ``Attachment(14 BlockQuant(bits=4) by
        allgather, 3 exact; policy auto; 2 ranks; 5.3 of 40.2 MB per step; step 1,200, 96.1 ms)``."""
        ranks, step_s = self._runtime.world_size, self._journal.step_s
        sent = f"{volume(self._sent_nbytes())} of {volume(self._plain_nbytes())} sent per step"
        parts = [self._running(), plural(ranks, "rank"), sent]
        if self._journal.step:
            parts.append(f"step {self._journal.step:,}" + ("" if step_s is None else f", {duration(step_s)}"))
        return f"{type(self).__name__}({'; '.join(parts)})"

    def _running(self) -> str:
        """The way in which the next step averages, in words."""
        return f"{summary_of(self.plan, self._runtime.world_size)}; policy {self._policy()}"

    def _policy(self) -> str:
        """The policy that has found the plan: its own, or else that of the last decision for it."""
        if self.plan.prediction is not None:
            return self.plan.prediction.policy
        fingerprint = self._fingerprint()
        decided = [each.policy for each in self._journal.decisions if each.plan_fingerprint == fingerprint]
        if decided:
            return decided[-1]
        return "given" if any(not unit.in_place for unit in self.plan.units) else "none"

    def _overlap(self) -> Overlap | None:
        """The overlap of backward and communication in a recent step of the plan that runs; ``None`` if it is not
        known."""
        traced = self.recorded_step
        is_known = traced is not None and traced.plan_fingerprint == self._fingerprint()
        return None if traced is None or not is_known else Overlap(traced.hidden_s, traced.exposed_s)

    def _fingerprint(self) -> str:
        """The fingerprint of the plan, computed once: it takes milliseconds for hundreds of units."""
        known = self._fingerprinted
        if known is None or known[0] is not self.plan:
            known = self._fingerprinted = (self.plan, self.plan.fingerprint())
        return known[1]

    def _plain_nbytes(self) -> float:
        """The bytes that this rank would send in a step without compression."""
        return allreduce_sent_nbytes(self._averaged_nbytes, self._runtime.world_size)

    def _sent_nbytes(self) -> float:
        """The bytes that this rank has sent in the last step; before the first, those of a step without compression."""
        last = self._runtime.last_sent_nbytes
        return self._plain_nbytes() if last is None else last


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
