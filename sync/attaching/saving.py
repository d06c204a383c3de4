"""The states of an attachment in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..communication.agreement import agreed
from ..engine.runtime import Runtime
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
        self._frontend, self.parking, self._changes, self._figures = frontend, parking, changes, figures
        self._tuning = tuning

    @property
    def adopts_plans(self) -> bool:
        """Whether the plan of a saved job runs when that is loaded, as with a tuning; then loading is collective."""
        return self._tuning is not None

    @property
    def runtime(self) -> Runtime:
        """Executes the plan that runs now."""
        return self._frontend.runtime

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank."""
        parked = self.parking.state_dict()
        own = self.own()
        return self.runtime.state_dict() | ({"parked": parked} if parked else {}) | own | self.notes()

    def own(self) -> dict[str, Any]:
        """The state of the front end on this rank, beside that of its runtime. It waits for what is on its way."""
        return self._frontend.state_dict()

    def read_own(self, states: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """A function that continues from a state of :meth:`own`, or from those of all ranks, with their ranks.

        Raises:
            ValueError: a state is damaged, or does not fit the model.
        """
        return self._frontend.read(states)

    def load_state_dict(self, state: Any, together: bool = False) -> None:
        """Continue from a state, or from those of all ranks.

        Args:
            state: the state, or a list of all.
            together: whether all ranks call this together, and raise if one does. They do in any case if they adopt the
                plan.
        """

        def check() -> tuple[tuple[Job, Callable[[], None]], list[str]]:
            job, take_rest = self._read(state)
            return (job, take_rest), [f"step {job.step}", *self._frontend.common(job.plan).lines()]

        if together or self.adopts_plans:
            job, take_rest = agreed("load_state_dict", self._frontend.group, self._frontend.device, check)
        else:
            (job, take_rest), _ = check()
        if self.adopts_plans:
            self.adopt(job.plan)
        self.runtime.take_over(job)
        take_rest()

    def _read(self, state: Any) -> tuple[Job, Callable[[], None]]:
        """The job of a state or of those of all ranks, and a function that continues from the rest of it, behind the
        residuals."""
        job = self.runtime.read(state)
        take_notes = self.read_notes(job)
        take_own = self.read_own(state if isinstance(state, list | tuple) else [state])

        def take() -> None:
            take_notes()
            take_own()

        return job, take

    def adopt(self, saved: Plan) -> None:
        """Let the plan of a saved job run at once, because its residuals are loaded next. Collective."""
        self._changes.adopt(saved)
        if self._tuning is not None:
            self._tuning.adopted()

    def notes(self) -> dict[str, str]:
        """The texts of a checkpoint, beside what the runtime keeps."""
        averaged = self._frontend.averaged
        texts = {"journal": self._figures.journal.to_text()} | ({} if averaged == GRADIENTS else {AVERAGED: averaged})
        return texts | ({} if self._tuning is None else self._tuning.notes())

    def read_notes(self, job: Job) -> Callable[[], None]:
        """A function that continues from the texts of a saved job, and from what it has parked, after its plan and its
        residuals.

        Raises:
            ValueError: a text is damaged, or of another kind of training, or something is parked of no parameter.
        """
        saved, averaged = job.notes.get(AVERAGED, GRADIENTS), self._frontend.averaged
        if saved != averaged:
            raise ValueError(f"state: of a training that averages {saved}, and this one averages {averaged}")
        take_parked = self.parking.read(job)
        text, figures = job.notes.get("journal"), self._figures
        journal = figures.journal if text is None else Journal.from_text(text)
        take_tuning = None if self._tuning is None else self._tuning.read(job)

        def take() -> None:
            figures.journal = journal
            take_parked()
            if take_tuning is not None:
                take_tuning()

        return take
