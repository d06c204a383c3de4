"""The states of an attachment in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..communication.agreement import agreed
from ..frontends.changes import PlanChanges
from ..frontends.frontend import GRADIENTS, ModelFrontend
from ..frontends.parking import Parking
from ..plans.plan import Plan
from ..states.jobs import AVERAGED, Job
from ..stats.history import Journal
from ..stats.stats import Figures
from ..tuning.tuning import Tuning


class SavedTraining:
    """The parts of an attachment that checkpoints save and load: what its runtime keeps from step to step, what is
    parked, and the texts of its figures and its tuning.

    Args:
        frontend, parking, changes, figures: the parts of the attachment.
        tuning: finds its plans, if none was given.
    """

    def __init__(
        self,
        frontend: ModelFrontend,
        parking: Parking,
        changes: PlanChanges,
        figures: Figures,
        tuning: Tuning | None,
    ) -> None:
        self.frontend, self.parking, self._changes, self._figures = frontend, parking, changes, figures
        self._tuning = tuning

    @property
    def adopts_plans(self) -> bool:
        """Whether the plan of a saved job runs when that is loaded, as with a tuning; then loading is collective."""
        return self._tuning is not None

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank."""
        parked = self.parking.state_dict()
        own = self.own_state()  # waits for what is on its way
        return self.frontend.runtime.state_dict() | ({"parked": parked} if parked else {}) | own | self.notes()

    def own_state(self) -> dict[str, Any]:
        """The entries of a state that the front end of the model keeps; none for most models."""
        elastic = self.frontend.elastic
        return {} if elastic is None else elastic.state_dict()

    def load_state_dict(self, state: Any, together: bool = False) -> None:
        """Continue from a state, or from those of all ranks.

        Args:
            state: the state, or a list of all.
            together: whether all ranks call this together, and raise if one does. They do in any case if they adopt the
                plan.
        """

        def check() -> tuple[tuple[Job, Callable[[], None]], list[str]]:
            job = self.frontend.runtime.read(state)
            take_rest = self.read_rest(job, state if isinstance(state, list | tuple) else [state])
            return (job, take_rest), [f"step {job.step}", *self.frontend.common(job.plan).lines()]

        if together or self.adopts_plans:
            job, take_rest = agreed("load_state_dict", self.frontend.group, self.frontend.device, check)
        else:
            (job, take_rest), _ = check()
        if self.adopts_plans:
            self.adopt(job.plan)
        self.frontend.settle()
        self.frontend.runtime.take_over(job)
        take_rest()

    def adopt(self, saved: Plan) -> None:
        """Let the plan of a saved job run at once, because its residuals are loaded next. Collective."""
        self._changes.adopt(saved)
        if self._tuning is not None:
            self._tuning.adopted()

    def notes(self) -> dict[str, str]:
        """The texts of a checkpoint, beside what the runtime keeps."""
        averaged = self.frontend.averaged
        texts = {"journal": self._figures.journal.to_text()} | ({} if averaged == GRADIENTS else {AVERAGED: averaged})
        return texts | ({} if self._tuning is None else self._tuning.notes())

    def read_rest(self, job: Job, states: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """A function that continues from what a saved job has beside its plan and residuals, after these: its texts,
        what it has parked, and the states of its front end.

        Args:
            job: the job.
            states: the state of this rank, or those of all; empty if they have nothing of a front end.

        Raises:
            ValueError: a text or a state is damaged, or of another kind of training, or does not fit the model.
        """
        saved, averaged = job.notes.get(AVERAGED, GRADIENTS), self.frontend.averaged
        if saved != averaged:
            raise ValueError(f"state: of a training that averages {saved}, and this one averages {averaged}")
        take_parked = self.parking.read(job)
        text, figures = job.notes.get("journal"), self._figures
        journal = figures.journal if text is None else Journal.from_text(text)
        take_tuning = None if self._tuning is None else self._tuning.read(job)
        elastic = self.frontend.elastic
        take_own = elastic.read(states) if elastic is not None and states else None

        def take() -> None:
            figures.journal = journal
            for each in (take_parked, take_tuning, take_own):
                if each is not None:
                    each()

        return take
