"""Trials of plans: every arm has its turn, close ones have more, and plain wins unless it is clearly beaten."""

from __future__ import annotations

import random

import pytest

from gckernels.sync.tuning.trials.trials import LONG_TURN, PLAIN, SHORTEST, TURN, UNCOUNTED, Trials, Turn


def played(medians_s, left=51, jitter=0.0, spread=None, more=0):
    """The trials of arms whose steps take these seconds, and the arms of the turns."""
    trials, arms = Trials.of(len(medians_s)), []
    while (turn := trials.next_turn(left, more)) is not None:
        is_first = not trials.turns[turn.arm]
        assert SHORTEST <= turn.steps <= (TURN if is_first else min(LONG_TURN, left + more))
        left -= turn.steps
        arms.append(turn.arm)
        scale = jitter if spread is None else spread[turn.arm]
        counted = range(turn.steps - UNCOUNTED)
        times = [medians_s[turn.arm] * (1.0 + scale * (1 if step % 2 else -1)) for step in counted]
        trials = trials.after(turn.arm, times)
    return trials, arms


def test_every_arm_has_a_turn_plain_first():
    trials, arms = played([1.0, 0.5, 0.7])
    assert arms == [0, 1, 2]
    assert trials.winner == 1


def test_close_arms_have_more_turns_and_the_others_none():
    _, arms = played([1.0, 0.50, 0.51], left=100)
    assert arms[:3] == [0, 1, 2]
    assert set(arms[3:]) == {1, 2}


def test_an_arm_that_is_close_to_plain_is_tried_again_beside_it():
    trials, arms = played([1.0, 0.97], left=51)
    assert arms == [0, 1, 1, 0, 1]
    assert trials.winner == 1


def test_first_turns_are_shorter_if_there_are_many_arms():
    assert Trials.of(4).next_turn(58).steps == TURN
    assert Trials.of(8).next_turn(58).steps == 58 // 8 - 1
    assert Trials.of(30).next_turn(58).steps == SHORTEST


def test_arms_that_join_have_a_turn_beside_what_was_measured_before():
    trials = Trials.of(1).after(PLAIN, [1.0] * 8).joined(1).after(1, [0.5] * 8)
    assert trials.winner == 1 and trials.next_turn(50) is None
    joined = trials.joined(1)
    assert joined.winner == 1 and joined.next_turn(20) == Turn(2, TURN)
    assert joined.after(2, [0.3] * 8).winner == 2


@pytest.mark.parametrize("gain", [-1.0, -0.01, 0.0, 0.01, 0.0199])
def test_plain_wins_unless_it_is_beaten_by_two_percent(gain):
    assert played([1.0, 1.0 - gain])[0].winner == PLAIN


def test_noisy_plain_steps_ask_for_a_larger_gain():
    assert played([1.0, 0.95])[0].winner == 1
    assert played([1.0, 0.95], spread=[0.2, 0.0])[0].winner == PLAIN
    assert played([1.0, 0.5], spread=[0.2, 0.2])[0].winner == 1


def noisy(medians_s, step_noise, turn_noise, rng, left=50):
    """The winner of trials whose steps, and whose turns as a whole, are slower by chance."""
    trials = Trials.of(len(medians_s))
    while (turn := trials.next_turn(left)) is not None:
        left -= turn.steps + 1
        turn_s = medians_s[turn.arm] * (1.0 + abs(rng.gauss(0.0, turn_noise)))
        times = [turn_s * (1.0 + abs(rng.gauss(0.0, step_noise))) for _ in range(turn.steps - UNCOUNTED)]
        trials = trials.after(turn.arm, times)
    return trials.winner


@pytest.mark.parametrize(
    ("step_noise", "turn_noise", "wrong"), [(0.01, 0.0, 0.0), (0.05, 0.0, 0.02), (0.1, 0.0, 0.05), (0.1, 0.1, 0.2)]
)
def test_plans_that_are_a_little_slower_rarely_win_by_chance(step_noise, turn_noise, wrong):
    rng = random.Random(0)
    winners = [noisy([1.0, 1.02, 1.02], step_noise, turn_noise, rng) for _ in range(100)]
    assert sum(winner != PLAIN for winner in winners) <= 100 * wrong
    assert all(noisy([1.0, 0.5, 0.9], step_noise, turn_noise, rng) == 1 for _ in range(20))


@pytest.mark.parametrize(("step_noise", "gain", "missed"), [(0.01, 0.05, 0.0), (0.05, 0.05, 0.15), (0.1, 0.1, 0.1)])
def test_gains_are_rarely_missed_because_of_noise(step_noise, gain, missed):
    rng = random.Random(0)
    winners = [noisy([1.0, 1.0 - gain, 1.0], step_noise, 0.0, rng) for _ in range(100)]
    assert sum(winner != 1 for winner in winners) <= 100 * missed


def test_turns_that_differ_are_noise_although_their_steps_are_alike():
    trials = Trials.of(2).after(0, [1.0] * 8).after(1, [0.8] * 8)
    assert trials.winner == 1
    assert trials.after(0, [1.3] * 8).after(1, [1.1] * 8).winner == PLAIN


def test_a_gain_near_two_percent_is_doubtful_if_noise_is_as_large():
    noisy_ones = [0.6, 1.4] * 4
    trials = Trials.of(2).after(0, noisy_ones)
    assert not trials.is_doubtful
    assert trials.after(1, [0.9 * each for each in noisy_ones]).is_doubtful
    assert trials.after(1, [1.1 * each for each in noisy_ones]).is_doubtful
    assert not trials.after(1, [2.0 * each for each in noisy_ones]).is_doubtful, "it has lost"
    assert not trials.after(1, [0.1 * each for each in noisy_ones]).is_doubtful, "it has won"
    assert not Trials.of(2).after(0, [1.0] * 8).after(1, [0.97] * 8).is_doubtful


def test_a_long_turn_counts_as_several():
    trials = Trials.of(2).after(0, [1.0] * 48).after(1, [1.0] * 9)
    assert [[len(turn) for turn in turns] for turns in trials.turns] == [[12] * 4, [9]]
    assert sum(map(len, Trials.of(1).after(0, [1.0] * 43).turns[0])) == 43


def test_rivals_of_the_best_arm_have_as_many_turns():
    trials, arms = played([1.0, 0.5, 0.6, 0.8], left=43, more=400)
    assert arms[:4] == [0, 1, 2, 3] and sorted(arms[4:]) == [1, 1, 2, 2] and trials.winner == 1
    assert played([1.0, 0.5, 0.7], left=43, more=400)[1] == [0, 1, 2], "it is too far away"
    assert played([1.0, 0.7, 1.1], left=31, more=400)[1] == [0, 1, 2], "only one is faster than plain steps"


def test_plain_steps_have_as_many_turns_as_a_plan_that_is_little_faster():
    """The first steps of a training take longer than later ones."""
    trials, arms = played([1.0, 0.9, 1.1], left=31, more=400)
    assert arms[:3] == [0, 1, 2] and sorted(arms[3:]) == [0, 0, 1, 1] and trials.winner == 1


def test_noise_alone_does_not_take_its_place_from_a_plan_that_has_won_before():
    for incumbent, winner in ((None, PLAIN), (1, 1), (2, PLAIN)):
        trials = Trials.of(3, incumbent=incumbent).after(0, [0.8, 1.2] * 4).after(1, [0.72, 1.08] * 4)
        assert trials.after(2, [0.99] * 8).winner == winner
    assert trials.is_doubtful, "trials go on in any case"


def test_turns_are_long_while_noise_hides_what_a_plan_saves():
    trials = Trials.of(2).after(0, [0.6, 1.4] * 4).after(1, [0.5, 1.3] * 4)
    assert trials.next_turn(0) is None
    assert trials.next_turn(0, more=200).arm in (0, 1) and trials.next_turn(0, more=200).steps <= LONG_TURN


def test_one_slow_step_in_a_turn_changes_nothing():
    trials = Trials.of(2).after(0, [1.0] * 9).after(1, [0.8] * 8 + [30.0])
    assert trials.winner == 1
    assert Trials.of(2).after(0, [1.0] * 8 + [30.0]).after(1, [0.99] * 9).winner == PLAIN


def test_the_turns_never_take_more_steps_than_are_left():
    for left in range(60):
        trials, arms = played([1.0, 0.98, 0.97], left=left, jitter=0.1)
        taken = sum(len(times) for times in trials.step_s) + UNCOUNTED * len(arms)
        assert taken <= max(left, 3 * SHORTEST)


def test_arms_without_a_turn_do_not_win():
    assert Trials.of(3).winner == PLAIN
    assert Trials.of(3).after(0, [1.0] * 9).winner == PLAIN
    assert Trials.of(3).after(0, [1.0] * 9).after(2, [0.5] * 9).winner == 2


def test_nothing_is_tried_if_there_is_nothing_but_plain():
    trials, arms = played([1.0], left=51)
    assert arms == [0] and trials.winner == PLAIN


def test_without_time_every_arm_has_one_short_turn():
    trials, arms = played([1.0, 0.5], left=-50)
    assert arms == [0, 1] and trials.winner == 1
    assert {len(each) for each in trials.step_s} == {SHORTEST - UNCOUNTED}
