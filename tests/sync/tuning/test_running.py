"""The running phase: windows of a training become decisions and changes of the plan."""

from __future__ import annotations

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
from gckernels.sync.tuning.trials.race import Tuned
from gckernels.sync.tuning.trials.rules import stages_of
from gckernels.sync.tuning.trials.training import TunedTraining
from gckernels.sync.tuning.watching import watching
from gckernels.sync.tuning.watching.drift import WINDOW, Action
from gckernels.sync.tuning.watching.guard import Reading
from gckernels.sync.tuning.watching.monitor import Window
from gckernels.sync.tuning.watching.watching import Running

FOUR, EIGHT = BlockQuant(bits=4), BlockQuant()
ERRORS = {str(FOUR): 0.13, str(EIGHT): 0.01}
TRACE = ModelTrace("model", tuple(TracedTensor(name, 4096, 0.0, (64, 64), errors=ERRORS) for name in "ab"), 0.03, 0.01)
TUNED = Tuned(TRACE, "safe", step_s=0.1, none_s=0.15, computing_s=0.04)
SOURCE = Source("test", "0")
PREDICTION = Prediction(0.1, 0.15, "espresso", False, 0.02, SOURCE, SOURCE, 0.13)
PLAN = Plan(tuple(UnitPlan(name, 4096, FOUR, ALLGATHER, True) for name in "ab"), prediction=PREDICTION)
PLAIN = Plan(tuple(UnitPlan(name, 4096, Identity(), ALLREDUCE, False) for name in "ab"))


class FakeTraining(TunedTraining):
    """A training whose steps are those of a list of windows."""

    plan: Plan = PLAN
    steps = 0

    def __init__(self, plan: Plan) -> None:
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
        self.plan = plan
        self.steps += 1  # the exact step between the two plans
        yield

    def decide(self, decision: object) -> None:
        self.decisions.append(decision)

    def note_error(self, error: float) -> None:
        self.errors.append(error)


@pytest.fixture
def run(monkeypatch):
    """Runs a plan for some windows; returns the action, the handle, and the running phase."""
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

    def run(given: list[Window], plan: Plan = PLAN, tuned: Tuned = TUNED, phase: Running | None = None):
        handle = FakeTraining(plan) if phase is None else phase._training
        windows[:] = given
        phase = phase or Running(handle, None, {})
        steps = phase.watched(tuned, until=handle.steps + 50)
        while True:
            try:
                next(steps)
                handle.steps += 1
            except StopIteration as ended:
                return SimpleNamespace(action=ended.value, handle=handle, phase=phase)

    return run


def window(step_s: float, **errors: float) -> Window:
    readings = {key: Reading(error, error) for key, error in errors.items()}
    return Window(WINDOW, step_s, max(errors.values(), default=0.0), readings)


def test_a_training_as_expected_runs_on_and_says_nothing(run):
    done = run([window(0.1, a=0.1, b=0.13)] * 40)
    assert done.action is Action.STAY and done.handle.steps == 50
    assert done.handle.decisions == [] and done.handle.errors == [0.13] * 40 and done.handle.plan is PLAN


@pytest.mark.parametrize(
    ("step_s", "windows", "action", "text"),
    [
        (0.13, 3, Action.REPLAN, "planning anew"),
        (0.5, 1, Action.REPLAN_LINK, "waits for communication 7.67 times as long"),
    ],
)
def test_steps_of_another_length_end_the_phase_with_a_reason(run, step_s, windows, action, text):
    done = run([window(step_s)] * 10)
    assert done.action is action and done.handle.steps == windows
    assert text in done.handle.decisions[-1].text and "100 ms are expected" in done.handle.decisions[-1].text


def test_compression_that_loses_ends_the_phase_with_a_trial(run):
    done = run([window(0.11)] * 10, tuned=replace(TUNED, none_s=0.105))
    assert done.action is Action.TRY_NONE and "plain" in done.handle.decisions[-1].text


def test_compressed_steps_that_became_faster_end_the_phase_with_a_trial(run):
    done = run([window(0.077)] * 10)
    assert done.action is Action.TRY_NONE and done.handle.steps == 3
    assert "-23 %" in done.handle.decisions[-1].text


def test_plain_steps_that_became_faster_are_expected_from_then_on(run):
    plain = replace(TUNED, step_s=0.15)
    assert run([window(0.1)] * 40, plan=PLAIN, tuned=plain).handle.decisions == []
    done = run([*[window(0.1)] * 5, *[window(0.15)] * 5], plan=PLAIN, tuned=plain)
    assert done.action is Action.REPLAN and "100 ms are expected" in done.handle.decisions[-1].text


def test_allowances_go_on_from_one_phase_to_the_next(run):
    done = run([window(0.13)] * 10)
    again = run([window(0.13)] * 9, phase=done.phase)
    assert (done.action, again.action) == (Action.REPLAN, Action.STAY)


def test_allowances_go_on_in_a_resumed_training(run):
    """With the text of a checkpoint."""
    phase, stages = run([window(0.13)] * 10).phase, stages_of("safe")
    saved = Progress(0, "auto", replace(TUNED, accuracy=stages[0].accuracy), waits=phase.waits)
    read = Progress.from_text(saved.to_text(stages, 2), stages, 2, 1000)
    assert read == saved and len(read.waits) == 3
    again = Running(FakeTraining(PLAN), None, {}, read.waits)
    assert run([window(0.13)] * 9, phase=again).action is Action.STAY
    fresh = Running(FakeTraining(PLAN), None, {})
    assert run([window(0.13)] * 9, phase=fresh).action is Action.REPLAN


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
    assert done.action is Action.STAY
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
    assert done.action is Action.STAY and done.handle.plan is PLAN


def test_a_finer_plan_is_measured_by_its_first_window(run):
    """It may take longer than the plan of the trials. Only then it counts as drift."""
    faults = [window(0.1, b=0.3)] * 3
    assert run([*faults, *[window(0.13, b=0.01)] * 20]).action is Action.STAY
    close = replace(TUNED, none_s=0.135)
    assert run([*faults, *[window(0.13)] * 3, *[window(0.14)] * 3], tuned=close).action is Action.TRY_NONE
    assert run([*faults, *[window(0.13, b=0.01)] * 3, *[window(0.17)] * 3]).action is Action.REPLAN


def test_decisions_name_the_policy_of_a_plan_without_a_prediction(run):
    (decision,) = run([window(0.13)] * 3, replace(PLAN, prediction=None)).handle.decisions
    assert decision.policy == "refined"


def test_plain_steps_are_watched_without_residuals(run):
    done = run([window(0.13)] * 3, PLAIN, replace(TUNED, step_s=0.1, none_s=0.1))
    assert done.action is Action.REPLAN and done.handle.errors == []
