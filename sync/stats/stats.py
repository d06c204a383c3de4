"""Figures of a training with a plan: its journal, and a dict for dashboards."""

from __future__ import annotations

import logging

import torch

from ..frontends.frontend import ModelFrontend, Overlap
from ..plans.names import summary_of
from ..plans.numbers import duration, plural, volume
from ..plans.plan import Plan
from ..programs.sizes import plain_sent_nbytes
from .decisions import LOGGER, Decision
from .history import WINDOW, Journal

FINGERPRINT_CHARS = 12
"""Characters of a fingerprint that people see."""


class Figures:
    """Figures of a training.

    Args:
        frontend: the front end of the attachment.

    Attributes:
        journal: its decisions, and samples of its steps.
    """

    def __init__(self, frontend: ModelFrontend) -> None:
        self._frontend, self._span, self.journal = frontend, frontend.kind.span(), Journal()
        self._fingerprinted: tuple[Plan, str] | None = None

    def decide(self, decision: Decision) -> None:
        """Add a decision to the journal, and log it, if it is one that this rank logs. Communicates nothing."""
        self.journal.decisions.append(decision)
        if self._frontend.rank == 0 or decision.level >= logging.WARNING:
            LOGGER.log(decision.level, "gckernels: %s", decision.text)

    def end_step(self, _: bool) -> None:
        """Note the end of a synchronised step. Called on every rank, and communicates nothing."""
        journal, sent_nbytes = self.journal, self._frontend.runtime.last_sent_nbytes
        is_due = journal.end_step(self._plain_nbytes() if sent_nbytes is None else sent_nbytes)
        if is_due:
            journal.sample(self._residual_square(), self._fingerprint())
            if journal.step % WINDOW == 0 or journal.step == WINDOW // 10:
                self._frontend.runtime.tracer.ask()

    def _residual_square(self) -> torch.Tensor | None:
        """The square of the norm of all residuals of this rank, on its device; ``None`` without residuals."""
        runtime = self._frontend.runtime
        squares = [torch.linalg.vector_norm(each).square().to(runtime.device) for each in runtime.residuals()]
        return torch.stack(squares).sum() if squares else None

    # ---------------------------------------------------------------- for dashboards

    def stats(self) -> dict[str, float | int | str]:
        """The figures of this rank as a flat dict, as :meth:`gckernels.sync.Attachment.stats`."""
        journal, plan = self.journal, self._frontend.plan
        prediction, plain_nbytes = plan.prediction, self._plain_nbytes()
        sent_nbytes = self._sent_nbytes()
        plain_s = self._plain_s()
        samples, overlap = journal.samples, self._overlap()
        known: dict[str, float | int | str | None] = {
            "step": journal.step,
            "world_size": self._frontend.runtime.world_size,
            "plan": self._fingerprint()[:FINGERPRINT_CHARS],
            "policy": self.policy(),
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
            "residual_nbytes": self._frontend.runtime.residual_nbytes(),
            "error": prediction.error if journal.error is None and prediction is not None else journal.error,
            "decisions": len(journal.decisions),
        }
        return {name: value for name, value in known.items() if value is not None} | self._frontend.gather_stats()

    def described(self, following: Plan | None) -> str:
        """The way of the next step and the last figures in one line.

        Args:
            following: the plan to which exact steps lead; ``None`` if none follows.
        """
        runtime, step_s = self._frontend.runtime, self.journal.step_s
        ranks = runtime.world_size
        running = summary_of(self._frontend.plan, ranks)
        if following is None:
            running = f"{running}; policy {self.policy()}"
        else:
            running = f"exact steps, from {running} to {summary_of(following, ranks)}"
        sent = f"{volume(self._sent_nbytes())} of {volume(self._plain_nbytes())} sent per step"
        parts = [running, plural(ranks, "rank"), sent]
        if self.journal.step:
            parts.append(f"step {self.journal.step:,}" + ("" if step_s is None else f", {duration(step_s)}"))
        return "; ".join(parts)

    def _plain_s(self) -> float | None:
        """The seconds of a plain step: those of a step now, and what the plan saves by the last trials, or else as it
        was predicted; ``None`` if it is not known."""
        step_s, prediction = self.journal.step_s, self._frontend.plan.prediction
        tried = [each for each in self.journal.decisions if each.none_s is not None and each.measured_s is not None]
        if tried and step_s is not None:
            return step_s + (tried[-1].none_s or 0.0) - (tried[-1].measured_s or 0.0)
        return None if prediction is None else prediction.none_s

    def policy(self) -> str:
        """The policy that has found the plan: its own, or else the policy of the last decision for it."""
        plan = self._frontend.plan
        if plan.prediction is not None:
            return plan.prediction.policy
        fingerprint = self._fingerprint()
        decided = [each.policy for each in self.journal.decisions if each.plan_fingerprint == fingerprint]
        if decided:
            return decided[-1]
        return "given" if plan.compresses else "none"

    def _overlap(self) -> Overlap | None:
        """The overlap of backward and communication in a recent step of the plan that runs; ``None`` if it is not
        known."""
        if (known := self._frontend.overlap()) is not None:
            return known
        recorded = self._frontend.runtime.tracer.last
        is_known = recorded is not None and recorded.plan_fingerprint == self._fingerprint()
        return None if recorded is None or not is_known else Overlap(recorded.hidden_s, recorded.exposed_s)

    def _fingerprint(self) -> str:
        """The fingerprint of the plan, computed once: it takes milliseconds for hundreds of units."""
        known, plan = self._fingerprinted, self._frontend.plan
        if known is None or known[0] is not plan:
            known = self._fingerprinted = (plan, plan.fingerprint())
        return known[1]

    def _plain_nbytes(self) -> float:
        """The bytes that this rank would send in a step without compression."""
        frontend = self._frontend
        return plain_sent_nbytes(frontend.averaged_nbytes, frontend.runtime.world_size, self._span)

    def _sent_nbytes(self) -> float:
        """The bytes that this rank has sent in the last step; before the first, those of a step without compression."""
        last = self._frontend.runtime.last_sent_nbytes
        return self._plain_nbytes() if last is None else last
