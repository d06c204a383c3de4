"""Predicted plans: after uniform plans were tried, rank 0 searches between some steps for plans that choose per tensor.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..communication.agreement import Failure, together
from ..communication.cores import Cores
from ..planner.machines.machine import Shared
from ..planner.machines.sharding import Sharding
from ..plans.plan import Frontend, Plan
from ..traces.model_trace import ModelTrace
from ..tuning.trials.race import Race
from ..tuning.trials.rules import Phase
from ..tuning.trials.training import Steps, TunedTraining
from ..tuning.trials.trials import PLAIN
from .background_search import Slices
from .planning import Proposal, TriedPlans, proposal, proposed
from .trial_machine import StageTime, TrialMachine, stage_times

SLICES, SLICE_S = 20, 0.2
"""Steps after which rank 0 searches for plans, and the seconds that it does so after each but the last of them."""


class PredictedPlans:
    """Proposes the plans of a cost model, which is fitted to the steps of plans that were tried.

    Args:
        training: the training.
    """

    needs_trace = True

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
        trials = race.trials
        measured_s = {race.arms[arm]: trials.median_s(arm) for arm in race.sent_nbytes if arm != PLAIN}
        tried = TriedPlans(measured_s, min(*measured_s.values(), trials.median_s(PLAIN)))

        def search(rest: Callable[[], None]) -> Proposal:
            machine = TrialMachine.of(stages, ranks.world_size, computes_on, max(cores, 1.0))
            sharding = None
            if frontend.kind is Frontend.FSDP:  # trials do not measure gathers, which are the same in all proposals
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
