"""The regret of choices in drawn worlds: what the rules lose against the plan that is best in hindsight."""

from __future__ import annotations

import pytest

from worlds import KINDS, Regrets, World, play

MEDIAN, NINETY, WORST = 1.025, 1.05, 1.12
LIMITS = {"quiet": 1.02, "another link": 1.03, "two tenants": 1.03}
"""The largest median in worlds of a kind, if it is another one than :data:`MEDIAN`. Where two tenants alternate, every
change is one of the machine."""
WORST_LIMITS = {"two tenants": 1.25}
"""Where they alternate as fast as turns do, most comparisons are disturbed, and a better plan is found late."""


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [("bursts", 30), *[pytest.param(kind, 150, marks=pytest.mark.slow) for kind in KINDS]],
)
def test_choices_lose_little_in_worlds_that_change(kind, worlds):
    found = Regrets.of(kind, worlds)
    assert found.median <= LIMITS.get(kind, MEDIAN)
    assert found.ninety <= NINETY and found.worst <= WORST_LIMITS.get(kind, WORST)
    assert not found.ended_plain


def test_choices_are_the_same_from_the_same_times():
    assert play(World("bursts", 7)) == play(World("bursts", 7))
