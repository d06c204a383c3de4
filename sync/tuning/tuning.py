"""The tuning of an attachment that finds its plans itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..frontends.changes import PlanChanges
from ..frontends.checks.models import sparse, sparse_parameter, why_uncompressed
from ..frontends.frontend import ModelFrontend
from ..frontends.listeners import Listeners
from ..plans.names import summary_of
from ..plans.plan import Plan
from ..stats.stats import Figures
from ..traces.model_parameters import unclassified, unmeasured
from ..traces.traced_tensors import Role
from .auto import Auto
from .progress import Progress
from .proposers import proposers_of
from .trials.rules import Rules
from .trials.sentences import PLAIN, failed, given, guessed, left
from .trials.training import TunedTraining
from .tuner import Tuner

if TYPE_CHECKING:
    from ..states.jobs import Job

GIVEN = "given"
"""The policy of a plan that the training has given."""
_UNEVEN = "in join() ranks may have different numbers of steps, and it needs all ranks in each"


class Tuning:
    """Finds plans while a model is trained. The plan that runs compresses nothing.

    Args:
        frontend, changes, figures, listeners: the parts of the attachment.
        model: the model that was given, which is not kept.
        auto: the settings.
        start_step: the first step that may be compressed.
    """

    def __init__(
        self,
        frontend: ModelFrontend,
        changes: PlanChanges,
        figures: Figures,
        listeners: Listeners,
        model: torch.nn.Module,
        auto: Auto,
        start_step: int,
    ) -> None:
        self._training = training = TunedTraining(frontend, changes, figures, listeners)
        self._changes = changes
        self._tuner: Tuner | None = None
        self._is_given = False  # whether the training has changed the plan itself
        parameters = frontend.parameters()
        trace, unknown = unmeasured(model, parameters), unclassified(model, parameters)
        spared = [each.name for each in trace.tensors if each.name in unknown and each.role is not Role.WEIGHT]
        phases = (each.saying(guessed(spared)) if spared else each for each in auto.phases(start_step))
        self._rules = Rules(tuple(phases), trace, frontend.request.gathered_by)
        self._plain = training.plan
        if training.ranks.world_size == 1:
            training.listeners.add(_count)
            return
        name = sparse_parameter(model, parameters)
        if refusal := why_uncompressed(parameters) if name is None else sparse(name):
            training.listeners.add(_count)
            self._warn_of_failure(refusal)
            return
        self._tuner = Tuner(training, model, self._rules, proposers_of(training, auto.propose), auto.replan)

    def close(self) -> None:
        """Let the plan stay that runs now. Further calls do nothing."""
        if self._tuner is not None:
            self._tuner.close()
            self._tuner = None

    def give(self, plan: Plan) -> None:
        """Note that the training has given a plan itself, and look for no other one."""
        self._is_given = True
        if self._tuner is not None:
            self.close()
            refusal = self._rules.refusal(plan, self._training.steps)
            self._training.say(given(self._named(plan), refusal), plan, GIVEN)

    def meet_uneven_steps(self, may_abandon: bool) -> None:
        """End, because in DDP's ``join()`` some ranks may not have the steps that others have.

        Args:
            may_abandon: whether a change of the plan may be abandoned now.
        """
        if self._tuner is not None:
            self.close()
            if may_abandon:
                self._changes.abandon()
            self._warn_of_failure(_UNEVEN)

    def stats(self) -> dict[str, float | int | str]:
        """Figures of the tuning, for :meth:`gckernels.sync.Attachment.stats`."""
        return {} if self._tuner is None else {"trial_steps": self._tuner.trial_steps}

    # ---------------------------------------------------------------- checkpoints

    def notes(self) -> dict[str, str]:
        """The texts of a checkpoint."""
        if self._is_given and self._changes.following is None:
            return {"tuning": Progress(is_given=True).to_text(self._rules.stages, self._training.ranks.world_size)}
        return {} if self._tuner is None else {"tuning": self._tuner.to_text()}

    def read(self, job: Job) -> Callable[[], None]:
        """A function that continues from the texts of a saved job, after its plan runs.

        Raises:
            ValueError: a text is damaged.
        """
        progress, text = Progress(why_anew="it was not found by a tuning"), job.notes.get("tuning")
        if text is not None:
            progress = Progress.from_text(text, self._rules.stages, self._training.ranks.world_size, job.step)
        return lambda: self._go_on(progress, job)

    def adopted(self) -> None:
        """Begin anew, because the plan of a saved job runs."""
        if self._tuner is not None:
            self._tuner.restart()

    def _go_on(self, progress: Progress, job: Job) -> None:
        """Continue a saved tuning with the plan of its job, which runs now, if the rules of this training allow it. A
        plan that the training has given needs no rule, unless the rules have changed since. Collective."""
        training, rules, plan, tuner = self._training, self._rules, self._training.plan, self._tuner
        is_exempt = (progress.is_given and not progress.why_anew) or training.ranks.world_size == 1
        refusal = "" if is_exempt else rules.refusal(plan, training.steps, progress.remembered(rules.model))
        if refusal:
            self._changes.follow(self._changes.agreed(self._plain))
            training.say(left(self._named(plan), refusal), self._plain, "none")
            if tuner is not None:
                tuner.restart(Progress(found=progress.found))
        elif progress.is_given:
            self.give(plan)
        elif tuner is not None:
            is_same = job.plan.fingerprint() == plan.fingerprint()
            tuner.resume(progress if is_same else Progress(found=progress.found, why_anew="its programs have changed"))

    def _named(self, plan: Plan) -> str:
        return summary_of(plan, self._training.ranks.world_size)

    def _warn_of_failure(self, error: str) -> None:
        """Say that nothing is tuned, and why."""
        goes_on = "the plan that runs now" if self._training.plan.compresses else PLAIN
        self._training.say(failed("tuning", error, goes_on), level=logging.WARNING)


def _count() -> None:
    """Do nothing: steps are counted, which larger jobs continue."""
