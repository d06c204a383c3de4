"""The figures over a run keep their peaks when they are thinned, and their axes have round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gckernels.sync.reporting.run_picture import all_series, extremes, thinned, ticks, top_of
from gckernels.sync.reporting.sections import plain_time, speedup, step_time
from reports import example


@pytest.mark.parametrize("last", [1e-6, 0.3, 0.999, 1.0, 7.0, 43.6, 99.9, 8200.0, 3e12])
@pytest.mark.parametrize("count", [2, 5])
def test_axes_are_marked_at_round_numbers(last, count):
    marks = ticks(last, count)
    assert marks[0] == 0 and marks[-1] <= last * (1 + 1e-6)
    assert 1 <= len(marks) - 1 <= count + 1
    assert float(f"{marks[1]:.1g}") == pytest.approx(marks[1])


def test_axes_without_an_extent_have_one_mark():
    assert ticks(0.0, 5) == [0.0] and ticks(float("inf"), 5) == [0.0]
    assert top_of(0.0) == 1.0 and top_of(5.0) > 5.0


def test_long_lines_keep_their_peaks():
    points = [(step, 1.0 + (step == 1234) - 0.5 * (step == 777)) for step in range(5000)]
    kept = extremes(points, 100)
    assert len(kept) <= 101 and {(1234, 2.0), (777, 0.5)} <= set(kept) <= set(points)
    assert kept == sorted(kept)
    assert extremes(points[:100], 100) == points[:100]


def test_long_tables_keep_their_end():
    samples = example().samples
    rows = thinned(samples, 7)
    assert len(rows) <= 7 and rows[-1] == samples[-1]
    assert thinned(samples, 1000) == samples and len(thinned((), 5)) == 0


def test_pictures_without_values_are_left_out():
    data = example()
    norm = all_series(data)[-1]
    assert norm.is_worth(data.samples) and not norm.is_worth(data.samples[:1])
    assert not norm.is_worth([replace(row, residual_norm=0.0) for row in data.samples])


def test_lines_follow_the_decisions():
    data = example()
    plain, predicted = all_series(data)[0].levels
    assert plain.parts == ((0, 0.2843), (4360, 0.341))
    assert predicted.parts[-1] == (4360, 0.108)
    plain, predicted = all_series(replace(data, decisions=()))[0].levels
    assert plain.label.endswith("predicted") and predicted.parts == ((0, data.prediction.step_s),)


def test_times_are_those_since_the_last_decision():
    data = example()
    assert step_time(data).seconds == pytest.approx(0.109, rel=0.1) and step_time(data).measured
    until = replace(data, samples=tuple(row for row in data.samples if row.step <= 4360))
    assert step_time(until).seconds == 0.109  # measured for the decision
    assert plain_time(data).seconds == 0.341


def test_measured_times_are_not_compared_with_predicted_ones():
    data = replace(example(), decisions=())
    assert step_time(data).measured and not plain_time(data).measured
    assert speedup(data) == pytest.approx(data.prediction.none_s / data.prediction.step_s)
    assert speedup(replace(data, prediction=None)) is None
