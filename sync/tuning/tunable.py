"""Attachments and synchronizers that may find their plans themselves, and the settings of doing so."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import gckernels

from ..accuracy.accuracy import AccuracyLike
from ..communication.agreement import agreed
from ..communication.ranks import Ranks
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.checks.models import sparse, sparse_parameter, why_uncompressed
from ..frontends.handle import Handle
from ..plans.names import summary_of
from ..plans.plan import Plan
from ..predictive.machine_cache import KnownMachine
from ..states.jobs import Job
from ..stats.decisions import Decision
from ..tracing.combining import unmeasured
from .decisions import sentences, short_sentences
from .progress import Progress
from .trials.rules import Phase, Rules, stages_of
from .tuner import Tuner

GIVEN = "given"
"""The policy of a plan that the training has given."""


class Tunable(Handle):
    """An attachment or synchronizer whose plan may be tuned."""

    _tuner: Tuner | None = None
    _rules: Rules | None = None  # without a plan of its own
    _plain: Plan  # compresses nothing
    _is_given = False  # whether the training has changed the plan itself

    def _tune(self, model: torch.nn.Module, stages: Sequence[Phase], replan: bool) -> None:
        """Find plans while the model is trained. Collective, and may measure the machine. If a rank is gone, it closes
        the handle and raises.

        Args:
            model: the model that was given.
            stages: the rules of accuracy.
            replan: whether plans are made anew when the machine has changed.
        """
        self._adopts_plans = True
        self._rules, self._plain = Rules(tuple(stages), unmeasured(model, self.parameters())), self.plan
        if dist.get_world_size(self.group) == 1:
            self.on_step_end(lambda: None)  # so that steps are counted, which larger jobs continue
            return
        name = sparse_parameter(model, self.parameters())
        if refusal := why_uncompressed(self.parameters()) if name is None else sparse(name):
            self.on_step_end(lambda: None)
            self._warn_of_failure(refusal)
            return
        methods = list(dict.fromkeys(method for stage in stages for method in stage.methods))
        try:
            known = KnownMachine(Ranks(self.group, self.device), methods)
            self._tuner = Tuner(self, model, stages, known, replan)
        except BaseException:
            self.close()
            raise

    @outside_inference_mode
    def change_plan(self, plan: Plan) -> None:
        agreed = self._agreed(plan)
        self._keep_given(agreed)
        self._let_follow(agreed)

    def _keep_given(self, plan: Plan) -> None:
        """Note that the training has given a plan itself, and look for no other one."""
        self._is_given = self._rules is not None
        if self._tuner is not None and self._rules is not None:
            self._end_tuning()
            named, refusal = self._named(plan), self._rules.refusal(plan, self.steps)
            text, short = sentences.given(named, refusal), short_sentences.given(refusal)
            self.decide(Decision(self.steps, text, GIVEN, plan.fingerprint(), short=short))

    def _notes(self) -> dict[str, str]:
        notes, rules = super()._notes(), self._rules
        if rules is not None and self._is_given and not self.is_changing:
            notes["tuning"] = Progress(is_given=True).to_text(rules.stages, self._runtime.world_size)
        elif self._tuner is not None:
            notes["tuning"] = self._tuner.to_text()
        return notes

    def _read_notes(self, job: Job) -> Callable[[], None]:
        take, text, rules = super()._read_notes(job), job.notes.get("tuning"), self._rules
        if rules is None:
            return take
        progress = Progress(why_anew="it was not found by a tuning")
        if text is not None:
            progress = Progress.from_text(text, rules.stages, self._runtime.world_size, job.step)

        def take_all() -> None:
            take()
            self._continue_tuning(progress, job)

        return take_all

    def _continue_tuning(self, progress: Progress, job: Job) -> None:
        """Continue a saved tuning with the plan of its job, which runs now, if the rules of this training allow it. A
        plan that the training has given needs no rule, unless the rules have changed since. Collective."""
        rules, plan, tuner = self._rules, self.plan, self._tuner
        assert rules is not None
        is_exempt = (progress.is_given and not progress.why_anew) or self._runtime.world_size == 1
        refusal = "" if is_exempt else rules.refusal(plan, self.steps, progress.remembered(rules.model))
        if refusal:
            text, short = (each.left(self._named(plan), refusal) for each in (sentences, short_sentences))
            self._let_follow(self._agreed(self._plain))
            fingerprint = self._plain.fingerprint()
            self.decide(Decision(self.steps, text, "none", fingerprint, short=short))
            if tuner is not None:
                tuner.restart(Progress(found=progress.found))
        elif progress.is_given:
            self._keep_given(plan)
        elif tuner is not None:
            is_same = job.plan.fingerprint() == plan.fingerprint()
            tuner.resume(progress if is_same else Progress(found=progress.found, why_anew="its programs have changed"))

    def _named(self, plan: Plan) -> str:
        return summary_of(plan, self._runtime.world_size)

    def _adopt(self, saved: Plan) -> None:
        super()._adopt(saved)
        if self._tuner is not None:
            self._tuner.restart()

    def _warn_of_failure(self, error: str) -> None:
        """Say that nothing is tuned, and why."""
        goes_on = "the plan that runs now" if any(not unit.in_place for unit in self.plan.units) else sentences.PLAIN
        text, short = (each.failed("tuning", error, goes_on) for each in (sentences, short_sentences))
        fingerprint = self.plan.fingerprint()
        self.decide(Decision(self.steps, text, self._policy(), fingerprint, level=logging.WARNING, short=short))

    def _end_tuning(self) -> None:
        """Let the plan stay that runs now."""
        if self._tuner is not None:
            self._tuner.close()
            self._tuner = None


def agreed_stages(
    caller: str,
    group: dist.ProcessGroup,
    device: torch.device,
    accuracy: AccuracyLike,
    steps: int | None,
    replan: bool,
    start_step: int,
    bucket_cap_mb: float | None = None,
) -> tuple[Phase, ...]:
    """The stages of a tuned training, if the arguments are valid and the same on all ranks. Collective.

    Args:
        caller: the name of the called function, for errors.
        group: all ranks.
        device: a device whose tensors the group can send.
        accuracy, steps, replan, start_step: as for :func:`~gckernels.sync.attach`.
        bucket_cap_mb: as for :class:`~gckernels.sync.Synchronizer`.

    Raises:
        TypeError, ValueError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them.
    """

    def check() -> tuple[tuple[Phase, ...], list[str]]:
        if type(replan) is not bool:
            raise TypeError(f"{caller}: replan must be True or False, got {replan!r}")
        if type(start_step) is not int or start_step < 0:
            raise ValueError(f"{caller}: start_step must be an int from 0 up, got {start_step!r}")
        if bucket_cap_mb is not None:
            raise ValueError(
                f"{caller}: bucket_cap_mb must be None without a plan, because the plan that is found says what is "
                f"launched together, got {bucket_cap_mb!r}"
            )
        try:
            stages = stages_of(accuracy, steps, start_step)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{caller}: {error}") from None
        shown = f"tuned, steps {steps}, replan {replan}, gckernels {gckernels.__version__}"
        return stages, [shown, *map(str, stages)]

    return agreed(caller, group, device, check)


def warn_of_settings(caller: str, accuracy: AccuracyLike, steps: int | None, replan: bool) -> None:
    """Warn if settings of the tuning are given beside a plan."""
    given: dict[str, Any] = {"accuracy": (accuracy, "safe"), "steps": (steps, None), "replan": (replan, True)}
    used = [name for name, (value, default) in given.items() if value is not default and value != default]
    if used:
        warnings.warn(f"{caller}: {', '.join(used)} has no effect beside a plan; leave out the plan", stacklevel=3)
