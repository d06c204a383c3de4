"""Searches for plans: some training steps are recorded, and rank 0 searches between the next ones.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch

from ..communication.agreement import Failure, together
from ..planner.machines.machine import Machine
from ..traces.model_trace import Trace
from ..tracing.model_tracer import ModelTracer
from ..tuning.trials.rules import RECORDED, WARMUP, Phase
from ..tuning.trials.training import Steps, TunedTraining
from .background_search import Slices
from .machine_cache import KnownMachine
from .planning import Proposal, proposal, proposed

SLICES, SLICE_S = 8, 0.2
"""Steps after which rank 0 searches for plans, and the seconds that it does so after each but the last of them."""
LONGEST_RECORDING = 30
"""Steps after which a recording is given up, such as that of a model whose hooks a compiler has left out."""


class PlanSearch:
    """Searches for plans while a model is trained with plain steps. Every rank makes one.

    Args:
        training: the training.
        model: the model that was given, which is not kept.
        known: the machine of the ranks.
    """

    def __init__(self, training: TunedTraining, model: torch.nn.Module, known: KnownMachine) -> None:
        self._training, self._model, self._known = training, weakref.ref(model), known
        self._frontend, self._ranks = training.frontend, training.ranks
        self._recorder: ModelTracer | None = None
        self._planning: Slices[Proposal] | None = None

    def close(self) -> None:
        """End a search that is in progress."""
        self._end_recording()
        self._end_planning()

    def found(
        self, stage: Phase, remembering: Callable[[Trace], Trace], again: bool
    ) -> Steps[tuple[Trace, Proposal] | Failure]:
        """A trace of the next steps, and the plans that are worth a trial.

        Args:
            stage: the rule of accuracy.
            remembering: adds to the trace what is known of compressors from the training so far.
            again: whether it has failed before.
        """
        if again:
            self._known.look_again()
        machine = self._known.look()
        if isinstance(machine, Failure):
            return machine
        recorded = yield from self._record(stage)
        if isinstance(recorded, Failure):
            return recorded
        trace = remembering(recorded)
        try:
            found = yield from self._propose(trace, machine, stage)
        finally:
            self._end_planning()
        return found if isinstance(found, Failure) else (trace, found)

    # ---------------------------------------------------------------- its parts

    def _record(self, stage: Phase) -> Steps[Trace | Failure]:
        """Record steps, and make a trace with the errors of the stage's compressors."""
        frontend = self._frontend
        recorder = together(frontend.group, frontend.device, self._new_recorder)
        if isinstance(recorder, Failure):
            self._end_recording()
            return recorder
        frontend.launch_late(recorder.before_averaging)  # on all ranks or on none
        is_done = False
        for _ in range(LONGEST_RECORDING):
            yield
            if is_done := recorder.end_step():
                break
        self._end_recording()
        if not is_done:
            return Failure(f"the model's steps could not be recorded in {LONGEST_RECORDING} of them")
        errors = together(frontend.group, frontend.device, lambda: recorder.errors(stage.methods))
        if isinstance(errors, Failure):
            return errors
        trace = recorder.trace(errors, stage.methods)
        return Failure("the model is gone") if trace is None else trace

    def _new_recorder(self) -> ModelTracer:
        model, frontend = self._model(), self._frontend
        if model is None:
            raise RuntimeError("the model is gone")
        parameters, (group, device) = frontend.sent_parameters(), (frontend.group, frontend.device)
        self._recorder = ModelTracer(model, parameters, group, device, RECORDED, WARMUP)
        return self._recorder

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            self._frontend.launch_late(None)

    def _propose(self, trace: Trace, machine: Machine, stage: Phase) -> Steps[Proposal | Failure]:
        """The proposal of rank 0, which searches between some steps, so that no step waits for long."""
        frontend, since = self._frontend, self._known.since
        work = Slices(lambda rest: proposal(trace, machine, frontend.kind, stage, since, rest))
        self._planning = work
        for left in reversed(range(SLICES)):
            yield
            waits = self._ranks.rank == 0 and not work.go_on(SLICE_S if left else math.inf)
            if not any(self._ranks.slowest([float(waits)])):
                break
        return proposed(frontend.group, frontend.device, self._training.checked, work.result)

    def _end_planning(self) -> None:
        if self._planning is not None:
            self._planning.close()
            self._planning = None
