"""Trials of plans: every arm has its turn, rivals are compared in turns, and plain stays unless it is beaten."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from gckernels.sync.tuning.trials.trials import MOST, PLAIN, TURN, UNCOUNTED, Rules, Trials, Turn

Draw = Callable[[int, int], float]
"""The seconds of an arm's step, given the number of all steps before it."""


class Player:
    """Plays rules with drawn steps.

    Args:
        draw: the seconds of a step.
        broken: the arms that cannot be built.
    """

    def __init__(self, draw: Draw, broken: frozenset[int] = frozenset()) -> None:
        self.draw, self.broken, self.step, self.turns = draw, broken, 0, []

    def play(self, rules: Rules[None]) -> None:
        try:
            turn = next(rules)
            while True:
                self.turns.append(turn)
                times = None
                if turn.arm not in self.broken:
                    times = [self.draw(turn.arm, self.step + at) for at in range(turn.uncounted, turn.steps)]
                    self.step += turn.steps
                turn = rules.send(times)
        except StopIteration:
            pass

    @property
    def arms(self) -> list[int]:
        return [turn.arm for turn in self.turns]


def raced(medians_s: list[float], jitter: float = 0.0, **options: frozenset[int]) -> tuple[Trials, Player]:
    """The trials of arms whose steps take these seconds after their first race, in which plain has its turn first."""
    player = Player(lambda arm, step: medians_s[arm] * (1.0 + jitter * (1 if step % 2 else -1)), **options)
    trials = Trials()
    player.play(trials.race())
    trials.join([1.0] * (len(medians_s) - 1))
    player.play(trials.race())
    return trials, player


def test_every_arm_has_a_turn_plain_first_and_the_best_one_another():
    trials, player = raced([1.0, 0.5, 0.7])
    assert player.arms == [0, 1, 2, 1] and trials.incumbent == 1
    assert player.turns == [Turn(arm, TURN, UNCOUNTED) for arm in (0, 1, 2, 1)]


def test_rivals_are_compared_in_turns_that_become_longer():
    trials, player = raced([1.0, 0.50, 0.49, 0.8], jitter=0.03)
    assert player.arms[:5] == [0, 1, 2, 3, 2] and trials.incumbent in (1, 2)
    later = player.turns[5:]
    assert {turn.arm for turn in later} == {1, 2} and later[0].arm == 1, "the best one has just run"
    assert [turn.steps for turn in later] == sorted(turn.steps for turn in later)
    assert sum(turn.steps + 1 for turn in later) <= MOST


@pytest.mark.parametrize("gain", [-1.0, -0.01, 0.0, 0.01, 0.0199])
def test_plain_stays_unless_it_is_beaten_by_two_percent(gain):
    assert raced([1.0, 1.0 - gain])[0].incumbent == PLAIN


@pytest.mark.parametrize("gain", [0.06, 0.2, 0.6])
def test_a_plan_that_gains_wins(gain):
    assert raced([1.0, 1.0 - gain])[0].incumbent == 1


def test_a_handicap_counts_as_longer_steps():
    for handicap, winner in ((1.0, 2), (1.34, 1)):
        trials, player = Trials(), Player(lambda arm, _: (1.0, 0.5, 0.45)[arm])
        player.play(trials.race())
        trials.join([1.0, handicap])
        player.play(trials.race())
        assert trials.incumbent == winner


def noisy(medians_s: list[float], step_noise: float, rng: random.Random) -> int:
    """The winner of trials whose steps are slower by chance."""
    trials, player = Trials(), Player(lambda arm, _: medians_s[arm] * (1.0 + abs(rng.gauss(0.0, step_noise))))
    player.play(trials.race())
    trials.join([1.0] * (len(medians_s) - 1))
    player.play(trials.race())
    return trials.incumbent


@pytest.mark.parametrize(("step_noise", "wrong"), [(0.01, 0.0), (0.05, 0.05), (0.1, 0.08)])
def test_plans_that_are_a_little_slower_rarely_win_by_chance(step_noise, wrong):
    rng = random.Random(0)
    winners = [noisy([1.0, 1.02, 1.02], step_noise, rng) for _ in range(100)]
    assert sum(winner != PLAIN for winner in winners) <= 100 * wrong
    assert all(noisy([1.0, 0.5, 0.9], step_noise, rng) == 1 for _ in range(20))


@pytest.mark.parametrize(("step_noise", "gain", "missed"), [(0.01, 0.05, 0.0), (0.05, 0.1, 0.1), (0.1, 0.15, 0.15)])
def test_gains_are_rarely_missed_because_of_noise(step_noise, gain, missed):
    rng = random.Random(0)
    winners = [noisy([1.0, 1.0 - gain, 1.0], step_noise, rng) for _ in range(100)]
    assert sum(winner != 1 for winner in winners) <= 100 * missed


def test_a_sweep_in_which_something_else_changes_is_made_again():
    """The turns of the compressed arms are disturbed, so that plain seems best."""
    trials, player = Trials(), Player(lambda arm, step: (1.0, 0.5, 0.7)[arm] * (3.0 if 5 <= step < 20 else 1.0))
    player.play(trials.race())
    trials.join([1.0, 1.0])
    player.play(trials.race())
    assert player.arms[:4] == [0, 1, 2, 0] and trials.was_disturbed
    assert trials.incumbent == 1


def test_one_disturbed_step_in_a_turn_changes_nothing():
    trials, _ = Trials(), None
    player = Player(lambda arm, step: (1.0, 0.5)[arm] * (30.0 if step in (3, 8, 9) else 1.0))
    player.play(trials.race())
    trials.join([1.0])
    player.play(trials.race())
    assert trials.incumbent == 1


def test_a_challenger_wins_when_it_is_faster_in_every_pair():
    trials, player = raced([1.0, 0.5, 0.7])
    player.draw = lambda arm, _: (1.0, 0.9, 0.6)[arm]
    player.turns.clear()
    player.play(trials.compare([2], [0.9] * 25))
    assert trials.incumbent == 2 and player.arms == [2, 1, 2, 1], "two turns, each before and after the incumbent's"
    assert trials.ratios[1] == pytest.approx(1.5, rel=0.01) and trials.ratios[2] == 1.0


def test_a_challenger_that_is_slower_has_one_turn():
    trials, player = raced([1.0, 0.5, 0.7])
    player.turns.clear()
    player.play(trials.compare([2], [0.5] * 25))
    assert trials.incumbent == 1 and player.arms == [2, 1]


@pytest.mark.parametrize("at", range(0, 12, 2))
def test_a_change_of_the_machine_in_a_comparison_lets_nobody_win(at):
    """Everything takes three times as long from some step on, or until then."""
    for slow, fast in itertools.permutations((3.0, 1.0)):
        trials, player = raced([1.0, 0.5, 0.55])
        begin = player.step
        player.draw = lambda arm, step, b=begin, s=slow, f=fast: (1.0, 0.5, 0.55)[arm] * (f if step - b < at else s)
        player.play(trials.compare([2], [0.5 * fast] * 25))
        assert trials.incumbent == 1


def test_an_arm_that_cannot_be_built_is_left_out():
    trials, player = raced([1.0, 0.3, 0.5], broken=frozenset([1]))
    assert trials.incumbent == 2 and trials.arms == (0, 2)
    player.turns.clear()
    player.play(trials.compare([1, 0], [0.5] * 25))
    assert player.arms == [0, 2]


def test_challengers_take_turns_without_news_and_the_fastest_one_comes_with_news():
    trials, player = raced([1.0, 0.5, 0.7, 0.8])
    assert trials.next_challengers(True) == [2] and trials.next_challengers(True, is_faster=True) == [2, PLAIN]
    seen = []
    for _ in range(6):
        seen += trials.next_challengers(False)
        player.play(trials.compare(seen[-1:], [0.5] * 25))
    assert seen[:3] == [2, 3, 0] and sorted(seen[3:]) == [0, 2, 3]
    assert raced([1.0])[0].next_challengers(False) == []


def test_comparisons_cost_a_small_share_of_all_steps():
    trials, player = raced([1.0, 0.2, 0.9])
    assert trials.may_compare and trials.lost_s == 0.0
    of_race = trials.steps
    while trials.may_compare:
        player.play(trials.compare([PLAIN], [0.2] * 25))
    # two exact steps and a turn of plain steps, each 0.8 s longer than the incumbent's
    compared = trials.steps - of_race
    assert trials.lost_s / (7 * 0.8) == pytest.approx(compared / 7, rel=0.02) and compared % 7 == 0
    for _ in range(1000):
        trials.ran([0.2] * 25)
    assert trials.may_compare


def test_a_saved_winner_goes_on_beside_what_was_known():
    trials = Trials()
    trials.join([1.0, 1.0])
    trials.resume(1, 0.5, 1.0)
    assert (trials.incumbent, trials.plain_s, trials.median_s(1)) == (1, 1.0, 0.5)
    assert set(trials.next_challengers(False)) <= {0, 2}


def test_the_plain_step_is_known_beside_the_one_that_runs():
    trials, _ = raced([1.0, 0.5])
    trials.ran([1.5] * 25)  # everything takes three times as long
    assert trials.plain_s == pytest.approx(3.0)


def test_nothing_is_tried_if_there_is_nothing_but_plain():
    trials, player = raced([1.0])
    assert trials.incumbent == PLAIN and player.arms == [0]
