"""Attachments and synchronizers that may find their plans themselves, and the settings of doing so."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import gckernels

from ..attach.agreement import agreed
from ..attach.decisions import Decision
from ..attach.handle import Handle
from ..attach.models import sparse, sparse_parameter
from ..planner.accuracy import AccuracyLike
from ..plans.plan import Plan
from ..plans.summary import summary_of
from ..profiling.ranks import Ranks
from ..states.jobs import Job
from . import sentences, short_sentences
from .known import KnownMachine
from .progress import Progress
from .rules import Stage, stages_of
from .tuner import Tuner

GIVEN = "given"
"""The note of a checkpoint, in place of the progress of a tuning, that the training has given the plan."""


class Tunable(Handle):
    """An attachment or synchronizer whose plan may be tuned."""

    _tuner: Tuner | None = None
    _is_given = False  # whether the training has changed the plan itself

    def _tune(self, model: torch.nn.Module, stages: Sequence[Stage], replan: bool) -> None:
        """Find plans while the model is trained. Collective, and may measure the machine. If a rank is gone, it closes
        the handle and raises.

        Args:
            model: the model that was given.
            stages: the rules of accuracy.
            replan: whether plans are made anew when the machine has changed.
        """
        self._adopts_plans = True
        if dist.get_world_size(self.group) == 1:
            self.on_step_end(lambda: None)  # so that steps are counted, which larger jobs continue
            return
        if (name := sparse_parameter(model, self.parameters())) is not None:
            self.on_step_end(lambda: None)
            self._warn_of_failure(sparse(name))
            return
        methods = list(dict.fromkeys(method for stage in stages for method in stage.methods))
        try:
            known = KnownMachine(Ranks(self.group, self.device), methods)
            self._tuner = Tuner(self, model, stages, known, replan)
        except BaseException:
            self.close()
            raise

    def change_plan(self, plan: Plan) -> None:
        agreed = self._agreed(plan)
        self._keep_given(agreed)
        self._let_follow(agreed)

    def _keep_given(self, plan: Plan) -> None:
        """Note that the training has given a plan itself, and look for no other one."""
        self._is_given = self._adopts_plans
        if self._tuner is not None:
            self._end_tuning()
            text, short = sentences.given(summary_of(plan, dist.get_world_size(self.group))), short_sentences.given()
            self.decide(Decision(self.steps, text, GIVEN, plan.fingerprint(), short=short))

    def _notes(self) -> dict[str, str]:
        if self._is_given and not self.is_changing:
            return super()._notes() | {"tuning": GIVEN}
        return super()._notes() | ({} if self._tuner is None else {"tuning": self._tuner.to_text()})

    def _read_notes(self, job: Job) -> Callable[[], None]:
        take, tuner, text = super()._read_notes(job), self._tuner, job.notes.get("tuning")
        if text == GIVEN:

            def take_given() -> None:
                take()
                self._keep_given(self.plan)

            return take_given
        if tuner is None:
            return take
        progress = Progress(why_anew="it was not found by a tuning") if text is None else tuner.read(text)

        def take_all() -> None:
            take()
            is_same = job.plan.fingerprint() == self.plan.fingerprint()
            tuner.resume(progress if is_same else Progress(found=progress.found, why_anew="its programs have changed"))

        return take_all

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
) -> tuple[Stage, ...]:
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

    def check() -> tuple[tuple[Stage, ...], list[str]]:
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
