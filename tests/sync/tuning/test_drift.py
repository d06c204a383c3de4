"""Rules of drift: which windows make a training leave its plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gckernels.sync.tuning.watching.drift import (
    PATIENCE,
    REPLAN_STEPS,
    SUDDEN_STEPS,
    WINDOW,
    Action,
    Allowance,
    Drift,
    Expected,
)

COMPRESSED = Expected(step_s=0.100, none_s=0.150, compute_s=0.040, compresses=True)
PLAIN = Expected(step_s=0.100, none_s=0.100, compute_s=0.040, compresses=False)


def actions(drift: Drift, windows: list[float]) -> list[Action]:
    found = []
    for step_s in windows:
        drift, action = drift.after(step_s)
        found.append(action)
    return found


@pytest.mark.parametrize("expected", [COMPRESSED, PLAIN], ids=["compressed", "plain"])
@pytest.mark.parametrize("step_s", [0.086, 0.1, 0.114])
def test_a_step_as_expected_changes_nothing(expected, step_s):
    assert set(actions(Drift(expected), [step_s] * 100)) == {Action.STAY}


@pytest.mark.parametrize("expected", [COMPRESSED, PLAIN], ids=["compressed", "plain"])
def test_three_slower_windows_make_a_new_plan(expected):
    assert actions(Drift(expected), [0.116] * 3) == [Action.STAY, Action.STAY, Action.REPLAN]


def test_faster_steps_make_no_new_plan():
    """Compression may pay no longer, which a trial of plain steps shows. Plain ones are good news."""
    assert actions(Drift(COMPRESSED), [0.084] * 3) == [Action.STAY, Action.STAY, Action.TRY_NONE]
    assert set(actions(Drift(PLAIN), [0.084] * 30 + [0.04] * 30)) == {Action.STAY}


def test_faster_plain_steps_are_expected_from_then_on():
    assert actions(Drift(PLAIN), [0.08] * 3 + [0.1] * 3)[-1] is Action.REPLAN
    assert actions(Drift(PLAIN), [0.05] * 3 + [0.07])[-1] is Action.REPLAN_LINK


def test_windows_away_must_follow_one_another_in_one_direction():
    assert set(actions(Drift(PLAIN), [0.12, 0.12, 0.1] * 10)) == {Action.STAY}
    assert set(actions(Drift(PLAIN), [0.12, 0.08] * 10)) == {Action.STAY}


def test_compression_that_loses_lets_plain_steps_be_tried():
    close = replace(COMPRESSED, none_s=0.105)
    assert actions(Drift(close), [0.108] * 3) == [Action.STAY, Action.STAY, Action.TRY_NONE]
    assert set(actions(Drift(close), [0.107] * 3)) == {Action.STAY}, "2 % slower is not enough"
    assert set(actions(Drift(PLAIN), [0.108] * 3)) == {Action.STAY}, "nothing else than plain steps can be tried"
    assert set(actions(Drift(replace(close, none_s=None)), [0.108] * 3)) == {Action.STAY}, "nothing to compare with"


@pytest.mark.parametrize(("expected", "step_s"), [(PLAIN, 0.161), (COMPRESSED, 0.161), (COMPRESSED, 0.069)])
def test_one_window_is_enough_when_the_wait_has_doubled_or_halved(expected, step_s):
    assert actions(Drift(expected), [step_s])[0] is Action.REPLAN_LINK


def test_a_short_wait_that_doubles_is_no_other_network():
    """With 2 ms of 100 to wait, twice as long is noise, and so are 25 ms more."""
    busy = Expected(step_s=0.100, none_s=0.100, compute_s=0.098, compresses=False)
    assert actions(Drift(busy), [0.104, 0.125]) == [Action.STAY, Action.STAY]
    assert actions(Drift(busy), [2.6]) == [Action.REPLAN_LINK]


def test_without_the_time_of_computing_the_whole_step_counts():
    unknown = replace(PLAIN, compute_s=0.0)
    assert actions(Drift(unknown), [0.19]) == [Action.STAY]
    assert actions(Drift(unknown), [0.21]) == [Action.REPLAN_LINK]


def test_new_plans_become_rarer_while_they_do_not_help():
    found = actions(Drift(PLAIN), [0.12] * 200)
    steps = [index * WINDOW for index, action in enumerate(found) if action is Action.REPLAN]
    waits = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert waits == [REPLAN_STEPS, 2 * REPLAN_STEPS, 4 * REPLAN_STEPS, 8 * REPLAN_STEPS]
    assert steps[0] == (PATIENCE - 1) * WINDOW, "the first need not wait"


def test_a_network_that_keeps_changing_makes_plans_rarer_too():
    drift, steps = Drift(PLAIN), []
    for window in range(1, 100):
        drift, action = drift.after(0.3 if window % 2 else 0.09)
        if action is Action.REPLAN_LINK:
            steps.append(window * WINDOW)
            drift = drift.renewed(PLAIN)
    waits = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert waits == sorted(waits) and waits[0] >= SUDDEN_STEPS and waits[-1] >= 8 * SUDDEN_STEPS


def test_another_network_need_not_wait_for_the_allowance_of_plans():
    drift, action = Drift(PLAIN).after(0.12)
    for _ in range(2):
        drift, action = drift.after(0.12)
    assert action is Action.REPLAN
    _, action = drift.renewed(PLAIN).after(0.5)
    assert action is Action.REPLAN_LINK


def test_old_actions_are_forgotten():
    allowance = Allowance(1000).spent().later(1000).spent()
    assert allowance.wait == 2000 and not allowance.later(1999).is_open
    assert allowance.later(2000).spent().wait == 4000
    assert allowance.later(8000).spent().wait == 1000


def test_new_trials_change_what_is_expected():
    drift, _ = Drift(PLAIN).after(0.12)
    drift = drift.renewed(replace(PLAIN, step_s=0.12, none_s=0.12))
    assert set(actions(drift, [0.12] * 30)) == {Action.STAY}
