"""Tests of turns of several steps, over loopback."""

from __future__ import annotations

from unittest import mock

import pytest

from bench.lib import turns
from bench.lib.arms import PLAIN, Arm, Setting
from gckernels.sync.lab import Network
from ranks import run_ranks, values_of


def run_turns():
    setting = Setting.of("digits", Network(2))
    arms = {name: Arm(PLAIN, setting) for name in ("one", "other")}
    with mock.patch.object(turns, "sent_nbytes", return_value=0):  # no namespace, no counter
        return turns.measured(arms, budget_s=0.0, least=3, most=5)


def test_all_ranks_agree_on_the_turns():
    first, second = values_of(run_ranks(2, run_turns))
    assert first == second and set(first) == {"one", "other"}
    for each in first.values():
        assert len(each.step_s) == len(each.wire_nbytes) == len(each.cpu_s) == 3
        assert min(each.step_s) > 0 and min(each.cpu_s) > 0


def test_turns_have_as_many_steps_as_fit():
    assert [turns.steps_of_a_turn(step_s) for step_s in (1e-4, 0.05, 0.3, 5.0)] == [turns.MAX_STEPS, 8, 2, 1]


def test_ratios_are_of_the_same_rounds():
    middle, error = turns.ratio_of([1.0, 20.0, 300.0, 2.0], [2.0, 40.0, 600.0, 4.0])
    assert middle == pytest.approx(0.5) and error == pytest.approx(0.0)


def test_turns_of_several_pieces_are_added():
    one, other = turns.Turns((1.0,), (2.0,), (3.0,)), turns.Turns((4.0,), (5.0,), (6.0,))
    assert one + other == turns.Turns((1.0, 4.0), (2.0, 5.0), (3.0, 6.0))
