"""A journal has a sample every ten steps at first, later every hundred."""

from __future__ import annotations

import time

import pytest
import torch

from gckernels.sync.stats.decisions import Decision
from gckernels.sync.stats.history import Journal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until its time is changed."""
    times = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: times[0])
    return times


def run(journal: Journal, clock: list[float], step_s: float, sent_nbytes: float, steps: int) -> None:
    for _ in range(steps):
        clock[0] += step_s
        if journal.end_step(sent_nbytes):
            journal.sample(torch.tensor(9.0), "3f9a")


def test_samples_are_due_every_ten_steps_and_every_hundred_later(clock):
    journal = Journal()
    run(journal, clock, 0.5, 8.0, 330)
    assert [each.step for each in journal.samples] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300]


def test_a_sample_is_of_the_steps_since_the_one_before(clock):
    journal = Journal()
    run(journal, clock, 0.5, 8.0, 10)
    clock[0] += 1000.0  # a pause of the training, which one step includes
    journal.error = 0.25
    run(journal, clock, 0.25, 4.0, 10)
    first, second = journal.samples
    assert (first.step_s, first.sent_nbytes, first.residual_norm, first.error) == (0.5, 8.0, 3.0, None)
    assert (second.step_s, second.sent_nbytes, second.residual_norm, second.error) == (0.25, 4.0, 3.0, 0.25)
    assert journal.samples == (first, second)


def test_the_step_time_is_that_of_the_last_steps(clock):
    journal = Journal()
    assert journal.step_s is None
    run(journal, clock, 0.5, 8.0, 1)
    assert journal.step_s is None  # where the first step began is not known
    run(journal, clock, 0.5, 8.0, 9)
    assert journal.step_s == 0.5
    run(journal, clock, 2.0, 8.0, 1)
    assert journal.step_s == 2.0


def test_a_continued_journal_has_what_was_saved_and_leaves_the_pause_out(clock):
    journal = Journal()
    journal.decisions.append(Decision(3, "chosen", "auto", "3f9a", none_s=1.0))
    journal.error = 0.25
    run(journal, clock, 0.5, 8.0, 109)
    again = Journal.from_text(journal.to_text())
    assert (again.step, again.error, again.step_s) == (109, 0.25, 0.5)
    assert (again.decisions, again.samples) == (journal.decisions, journal.samples)
    clock[0] += 1000.0
    run(again, clock, 0.25, 4.0, 91)
    assert [each.step for each in again.samples][-2:] == [100, 200] and again.samples[-1].step_s == 0.25


def test_one_step_alone_makes_no_sample(clock):
    journal = Journal()
    run(journal, clock, 0.5, 8.0, 9)
    again = Journal.from_text(journal.to_text())
    run(again, clock, 0.5, 8.0, 11)
    assert [each.step for each in again.samples] == [20]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": -1, "error": null, "decisions": [], "samples": []}'])
def test_a_damaged_journal_is_refused(text):
    with pytest.raises(ValueError, match="state: journal is not valid"):
        Journal.from_text(text)
