"""The watch over a plan that runs: windows of a training become decisions and changes of the plan."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gckernels import BlockQuant, Identity
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.communication.agreement import Failure
from gckernels.sync.plans.plan import Plan
from gckernels.sync.plans.prediction import Prediction, Source
from gckernels.sync.plans.units import UnitPlan
from gckernels.sync.programs.named import ALLGATHER, ALLREDUCE
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from gckernels.sync.tuning.progress import Progress
from gckernels.sync.tuning.trials.race import Race
from gckernels.sync.tuning.trials.rules import stages_of
from gckernels.sync.tuning.trials.training import Refused, TunedTraining
from gckernels.sync.tuning.trials.trials import Turn
from gckernels.sync.tuning.trials.tuned import Tuned
from gckernels.sync.tuning.watching import watching
from gckernels.sync.tuning.watching.guard import Reading
from gckernels.sync.tuning.watching.monitor import Window
from gckernels.sync.tuning.watching.pace import WINDOW, Pace
from gckernels.sync.tuning.watching.watching import Running

FOUR, EIGHT = BlockQuant(bits=4), BlockQuant()
ERRORS = {str(FOUR): 0.13, str(EIGHT): 0.01}
TRACE = ModelTrace("model", tuple(TracedTensor(name, 4096, 0.0, (64, 64), errors=ERRORS) for name in "ab"), 0.03, 0.01)
TUNED = Tuned(TRACE, "safe", step_s=0.1, none_s=0.15)
SOURCE = Source("test", "0")
PREDICTION = Prediction(0.1, 0.15, "espresso", False, 0.02, SOURCE, SOURCE, 0.13)
PLAN = Plan(tuple(UnitPlan(name, 4096, FOUR, ALLGATHER, True) for name in "ab"), prediction=PREDICTION)
EIGHTS = Plan(tuple(UnitPlan(name, 4096, EIGHT, ALLGATHER, True) for name in "ab"))
TURNS_S = {str(FOUR): 0.1, str(EIGHT): 0.12, str(Identity()): 0.15}
"""Seconds of a step in turns, by the compressor of the plan."""
PLAIN = Plan(tuple(UnitPlan(name, 4096, Identity(), ALLREDUCE, False) for name in "ab"))


class FakeTraining(TunedTraining):
    """A training whose steps are those of a list of windows."""

    plan: Plan = PLAN
    steps = 0

    def __init__(self, plan: Plan, refuses: str = "") -> None:
        self._refuses = refuses
        self.plan, self.decisions, self.errors = plan, [], []
        self.frontend = SimpleNamespace(group=None, device=None, runtime=SimpleNamespace(watch=None))
        self.ranks = SimpleNamespace(world_size=2)

    @property
    def policy(self) -> str:
        return "refined" if self.plan.prediction is None else self.plan.prediction.policy

    def checked(self, plan: Plan) -> Plan:
        plan.check([(name, torch.nn.Parameter(torch.zeros(64, 64))) for name in "ab"], 2)
        return plan

    def changed(self, plan: Plan) -> Iterator[None]:
        if self._refuses and str(plan.units[0].compressor) == self._refuses:
            raise Refused("no such plan")
        if plan != self.plan:
            self.plan = plan
            self.steps += 1  # the exact step between the two plans
            yield

    def decide(self, decision: object) -> None:
        self.decisions.append(decision)

    def note_error(self, error: float) -> None:
        self.errors.append(error)


@pytest.fixture
def run(monkeypatch):
    """Runs a plan for some windows; returns the training, the race and the watch. Turns of comparisons take the
    seconds that ``turns_s`` says, by compressors."""
    windows: list[Window] = []

    class FakeMonitor:
        def __init__(self, *args: object) -> None:
            pass

        def step_ended(self) -> Window | None:
            return windows.pop(0) if windows else None

    def alone(group: object, device: object, work: Callable[[], object]) -> object:
        try:
            return work()
        except ValueError as error:
            return Failure(str(error))

    monkeypatch.setattr(watching, "Monitor", FakeMonitor)
    monkeypatch.setattr(watching, "together", alone)

    def run(
        given: list[Window],
        plan: Plan = PLAN,
        turns_s: dict[str, float] = TURNS_S,
        pace: Pace | None = None,
        refuses: str = "",
    ) -> SimpleNamespace:
        handle = FakeTraining(plan, refuses)
        race = Race(handle, None, PLAIN)
        race.join(dict.fromkeys((PLAN, EIGHTS), "uniform"))
        race.resume(plan, 0.1, 0.15)
        turns: list[str] = []

        def take(turn: Turn) -> Iterator[None]:
            runs = str(handle.plan.units[0].compressor)
            turns.append(runs)
            yield
            race.sent_nbytes[turn.arm] = 0.0
            return [turns_s[runs]] * (turn.steps - turn.uncounted)

        monkeypatch.setattr(race, "_take", take)
        windows[:] = given
        phase = Running(handle, None, race, {}, pace)
        steps = phase.watched(TUNED, until=50)
        with contextlib.suppress(StopIteration):
            while True:
                next(steps)
                handle.steps += 1
        return SimpleNamespace(handle=handle, phase=phase, race=race, turns=turns)

    return run


def window(step_s: float, **errors: float) -> Window:
    readings = {key: Reading(error, error) for key, error in errors.items()}
    return Window(WINDOW, (step_s,) * WINDOW, max(errors.values(), default=0.0), readings)


def test_a_training_as_expected_runs_on_and_says_nothing(run):
    done = run([window(0.1, a=0.1, b=0.13)] * 10)
    assert done.handle.steps == 50 and done.turns == []
    assert done.handle.decisions == [] and done.handle.errors == [0.13] * 10 and done.handle.plan is PLAN


def test_steps_of_another_length_let_the_next_best_plan_be_compared(run):
    done = run([window(0.1), window(0.2)], turns_s=TURNS_S | {str(FOUR): 0.2, str(EIGHT): 0.12})
    assert done.turns == [str(EIGHT), str(FOUR)] * 2
    assert done.handle.plan is EIGHTS and done.race.winner is EIGHTS
    (decision,) = done.handle.decisions
    assert "a step takes 200 ms where 100 ms was usual (+100 %)" in decision.text
    assert "120 ms" in decision.text and decision.measured_s == 0.12 and decision.none_s is None


def test_a_plan_that_is_still_the_fastest_stays_without_a_word(run):
    done = run([window(0.1), window(0.2), window(0.2)], turns_s=TURNS_S | {str(FOUR): 0.2, str(EIGHT): 0.3})
    assert done.turns == [str(EIGHT), str(FOUR)] and done.handle.plan is PLAN and done.handle.decisions == []


def test_faster_steps_let_plain_ones_be_compared(run):
    times_s = TURNS_S | {str(FOUR): 0.05, str(Identity()): 0.03}
    done = run([window(0.1), window(0.05)], turns_s=times_s)
    assert done.handle.plan.units[0].compressor == Identity()
    (decision,) = done.handle.decisions
    assert (decision.measured_s, decision.none_s, decision.policy) == (0.03, 0.03, "none")


def test_a_plan_is_compared_again_when_the_last_time_is_long_ago(run):
    done = run([window(0.1)] * 3, pace=Pace(3 * WINDOW))
    assert done.turns == [str(EIGHT), str(FOUR)] and done.phase.pace == Pace(6 * WINDOW, 0, (0.1,) * 3)


def test_a_plan_that_is_refused_is_left_out_and_the_one_from_before_goes_on(run):
    done = run([window(0.1), window(0.2), window(0.5)], refuses=str(EIGHT))
    assert done.handle.plan is PLAN and done.race.trials.arms == (0, 1)
    (decision,) = done.handle.decisions
    assert "a comparison of plans failed" in decision.text


def test_the_pace_goes_on_in_a_resumed_training(run):
    """With the text of a checkpoint."""
    phase, stages = run([window(0.1)] * 3).phase, stages_of("safe")
    saved = Progress(0, "auto", replace(TUNED, accuracy=stages[0].accuracy), pace=phase.pace)
    read = Progress.from_text(saved.to_text(stages, 2), stages, 2, 1000)
    assert read.pace == Pace(phase.pace.gap, 3 * WINDOW) and read.tuned == saved.tuned


def test_a_job_is_resumed_after_an_error_without_bound(run):
    """A residual with NaN in it has one. New trials are made with a trace that remembers it."""
    done = run([window(0.1, b=math.inf)] * 3)
    trace, stages = TRACE.remembering(done.phase.found), stages_of("safe")
    saved = Progress(0, "auto", replace(TUNED, trace=trace, accuracy=stages[0].accuracy), done.phase.found)
    read = Progress.from_text(saved.to_text(stages, 2), stages, 2, 1000)
    assert read.found == saved.found == {("b", str(FOUR)): math.inf}
    assert FOUR not in allowed_compressors(read.tuned.trace, "safe")["b"]


def test_a_faulty_unit_gets_a_finer_compressor_and_the_log_says_so(run):
    done = run([window(0.1, a=0.1, b=0.3)] * 3 + [window(0.11, a=0.1, b=0.01)] * 5)
    assert [unit.compressor for unit in done.handle.plan.units] == [FOUR, EIGHT]
    (decision,) = done.handle.decisions
    assert "b: the error is 0.3, and 0.2 are allowed; BlockQuant" in decision.text
    assert (decision.policy, decision.plan_fingerprint) == ("espresso", done.handle.plan.fingerprint())
    allowed = allowed_compressors(TRACE.remembering(done.phase.found), "safe")
    assert FOUR in allowed["a"] and FOUR not in allowed["b"], "no later plan repeats it"


def test_units_go_finer_until_they_are_exact(run):
    done = run([window(0.1, a=0.3, b=0.3)] * 6)
    assert not any(unit.compressor != Identity() for unit in done.handle.plan.units)
    assert len(done.handle.decisions) == 2


def test_a_failure_leaves_the_plan_and_warns_once(run, monkeypatch):
    def fails(*_: object) -> Plan:
        raise ValueError("no finer plan")

    monkeypatch.setattr(watching, "finer", fails)
    done = run([window(0.1, b=0.3)] * 20)
    (decision,) = done.handle.decisions
    assert "no finer plan" in decision.text and decision.level == logging.WARNING
    assert done.handle.plan is PLAN


def test_a_finer_plan_takes_the_place_of_the_one_that_runs(run):
    """Plans with the same faults take no further part."""
    done = run([window(0.1, a=0.3, b=0.3)] * 3 + [window(0.3), window(0.3)])
    assert done.race.winner is done.handle.plan and done.turns == []
    assert done.race.trials.arms == (0, 1, 2), "the plan of finer compressors has no faults"
    again = run([window(0.1, a=0.3)] * 6)
    assert again.race.trials.arms == (0, 1), "now it has"


def test_decisions_name_the_policy_of_a_plan_without_a_prediction(run):
    (decision,) = run([window(0.1, a=0.1, b=0.3)] * 3, replace(PLAN, prediction=None)).handle.decisions
    assert decision.policy == "refined"


def test_plain_steps_are_watched_without_residuals(run):
    done = run([window(0.1), window(0.3)], PLAIN, turns_s=TURNS_S | {str(Identity()): 0.3})
    assert done.handle.plan is not PLAIN and done.handle.errors == []
