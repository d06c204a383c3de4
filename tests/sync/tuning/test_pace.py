"""The pace of a running plan: which windows let it be compared with others."""

from __future__ import annotations

import itertools

import pytest

from gckernels.sync.tuning.watching.pace import FIRST_GAP, LAST_GAP, SEEN, WINDOW, Occasion, Pace


def occasions(pace: Pace, windows: list[float], error: float = 0.01) -> list[Occasion | None]:
    """The occasions of some windows, if the plan always stays."""
    found = []
    for step_s in windows:
        pace, occasion = pace.after(step_s, WINDOW, error)
        found.append(occasion)
        if occasion is not None:
            pace = pace.compared(occasion, False)
    return found


def test_steps_as_before_are_compared_more_and_more_rarely():
    found = occasions(Pace(), [0.1, 0.11] * 300)
    assert set(found) == {None, Occasion.DUE}
    steps = [at * WINDOW for at, occasion in enumerate(found, start=1) if occasion is not None]
    gaps = [steps[0], *(after - before for before, after in itertools.pairwise(steps))]
    assert gaps == [min(FIRST_GAP * 2**at, LAST_GAP) for at in range(len(gaps))]


@pytest.mark.parametrize(("step_s", "occasion"), [(0.13, Occasion.SLOWER), (0.07, Occasion.FASTER), (0.11, None)])
def test_one_window_of_another_time_is_news(step_s, occasion):
    assert occasions(Pace(), [0.1, 0.1, step_s]) == [None, None, occasion]


def test_the_first_window_is_no_news():
    assert Pace().after(5.0, WINDOW, 0.01)[1] is None


def test_what_was_seen_before_is_no_news():
    """Another program that comes and goes is news once."""
    found = occasions(Pace(), [0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2])
    assert found == [None, Occasion.SLOWER, *[None] * 5]


def test_what_was_long_ago_is_news_again():
    found = occasions(Pace(), [0.1, 0.2, *[0.1] * SEEN, 0.2])
    assert found[-1] is Occasion.SLOWER


def test_noise_is_no_news():
    assert occasions(Pace(), [0.1, 0.139], error=0.1) == [None, None]


def test_another_plan_has_windows_of_its_own():
    pace, occasion = Pace(seen_s=(0.1,)).after(0.2, WINDOW, 0.01)
    changed = pace.compared(occasion, True)
    assert changed.seen_s == () and changed.after(0.5, WINDOW, 0.01)[1] is None


def test_news_lets_the_next_comparison_come_sooner():
    pace = Pace(4 * FIRST_GAP, 0, (0.1,))
    pace, occasion = pace.after(0.2, WINDOW, 0.01)
    assert pace.compared(occasion, False).gap == FIRST_GAP


def test_occasions_say_what_they_ask_for():
    assert Occasion.DUE.asks == (False, False)
    assert Occasion.SLOWER.asks == (True, False) and Occasion.FASTER.asks == (True, True)
