"""Predicted plans: after uniform plans were tried, rank 0 searches between some steps for plans that choose per tensor.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from gckernels.sync.communication.agreement import Failure, together
from gckernels.sync.communication.cores import Cores
from gckernels.sync.plans.plan import Plan
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.tuning.trials.race import Race
from gckernels.sync.tuning.trials.rules import Phase
from gckernels.sync.tuning.trials.training import Steps, TunedTraining
from gckernels.sync.tuning.trials.trials import PLAIN

from ..machines.machine import Sharding, Shared
from .planning import Proposal, TriedPlans, proposal, proposed
from .trial_machine import StageTime, TrialMachine, stage_times

T = TypeVar("T")

SLICES, SLICE_S = 20, 0.2
"""Steps after which rank 0 searches for plans, and the seconds that it does so after each but the last of them."""


def proposer(training: TunedTraining) -> PredictedPlans:
    """Returns what proposes plans that choose per tensor, for ``sync.Auto(propose=planner.proposer)``.

    A cost model is fitted to the steps of the plans that were tried. Its plans are tried as well if they are predicted
    to be faster by more than its error.

    Args:
        training: the training.
    """
    return PredictedPlans(training)


class PredictedPlans:
    """Proposes the plans of a cost model, which is fitted to the steps of plans that were tried."""

    def __init__(self, training: TunedTraining) -> None:
        self._training, self._frontend = training, training.frontend
        self._search: Slices[Proposal] | None = None

    def close(self) -> None:
        if self._search is not None:
            self._search.close()
            self._search = None

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        frontend, ranks = self._frontend, self._training.ranks
        if not trace.backward_s or not any(arm != PLAIN for arm in race.sent_nbytes):
            return ()  # nothing was recorded, or the rule allows nothing
        stages = together(frontend.group, frontend.device, lambda: _stages(race))
        if isinstance(stages, Failure):
            return stages
        most, least = ranks.slowest([len(stages), -len(stages)])
        if most != -least:
            return Failure("the ranks have recorded different stages")
        # on the other ranks stages wait for the one on which they take least
        shortest_s = [-each for each in ranks.slowest([-stage.seconds for stage in stages])]
        stages = [stage._replace(seconds=each) for stage, each in zip(stages, shortest_s, strict=True)]
        cores = Cores.of(frontend.group, frontend.device).least
        computes_on = Shared.CORES if frontend.device.type == "cpu" else Shared.DEVICE
        measured_s = {race.arms[arm]: race.trials.median_s(arm) for arm in race.sent_nbytes if arm != PLAIN}
        tried = TriedPlans(measured_s, min(*measured_s.values(), race.trials.median_s(PLAIN)))

        def search(rest: Callable[[], None]) -> Proposal:
            machine = TrialMachine.of(stages, ranks.world_size, computes_on, max(cores, 1.0))
            sharding = None
            if frontend.kind.gathers:  # trials do not measure gathers, which are the same in all proposals
                sharding = Sharding()
                machine = replace(machine, curves={"AllGather": machine.sending, **machine.curves})
            return proposal(trace, machine, frontend.kind, stage, tried, sharding, rest)

        work = self._search = Slices(search)
        try:
            for left in reversed(range(SLICES)):
                yield
                waits = ranks.rank == 0 and not work.go_on(SLICE_S if left else math.inf)
                if not any(ranks.slowest([float(waits)])):
                    break
            found = proposed(frontend.group, frontend.device, self._training.checked, work.result)
        finally:
            self.close()
        return found if isinstance(found, Failure) else found.finalists


def _stages(race: Race) -> list[StageTime]:
    return [stage for arm, step in sorted(race.recorded.items()) for stage in stage_times(race.arms[arm], step)]


# -------------------------------------------------------------------- long work in slices, between steps


class Abandoned(BaseException):
    """Raised in work that nobody waits for any more."""


class Slices(Generic[T]):
    """Work in a thread of its own, which only runs while its owner waits for it.

    The work must call :meth:`rest` often. So a training does not wait for all of it at once, and does not share its
    interpreter with it either.

    Args:
        work: the work; it is given :meth:`rest`.
        clock: returns seconds.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._clock = work, clock
        self._turn = threading.Condition()
        self._runs, self._is_abandoned = False, False
        self._until_s = 0.0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.done = False

    def go_on(self, seconds: float) -> bool:
        """Let the work go on for some seconds, or to its end, and return whether it has ended.

        Args:
            seconds: how long; it may take as much longer as the work takes from one rest to the next.
        """
        with self._turn:
            self._until_s, self._runs = self._clock() + seconds, True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="gckernels-planning", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many
                    self._error, self.done = error, True
                    return True
                self._thread = thread
            self._turn.notify_all()
            self._turn.wait_for(lambda: self.done or not self._runs)
        if self.done:
            self._thread.join()
        return self.done

    def result(self) -> T:
        """The result of the work. An exception of the work is raised here."""
        assert self.done
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def close(self) -> None:
        """End the work; without effect if it has ended."""
        if self._thread is None or self.done:
            return
        with self._turn:
            self._is_abandoned = self._runs = True
            self._turn.notify_all()
        self._thread.join()

    def rest(self) -> None:
        """Wait for the next slice if this one is over. The work calls it."""
        if self._clock() < self._until_s and not self._is_abandoned:
            return
        with self._turn:
            if not self._is_abandoned:
                self._runs = False
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._runs)
            if self._is_abandoned:
                raise Abandoned

    def _run(self) -> None:
        try:
            self._result = self._work(self.rest)
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        with self._turn:
            self.done = True
            self._turn.notify_all()
