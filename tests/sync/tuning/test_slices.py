"""Work in slices: it runs while its owner waits, and ends when nobody does any more."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from gckernels.planner.predictive import searching
from gckernels.planner.predictive.planning import Proposal
from gckernels.planner.predictive.searching import Slices
from gckernels.sync.tuning.trials.rules import RECORDED, STEPS, WARMUP
from gckernels.sync.tuning.trials.trials import TURN
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, proposal_of, scripted, train, tuned_handle


class Counting:
    """Work that counts to a number, one second each, by a clock of its own."""

    def __init__(self, last: int) -> None:
        self.count, self.now_s, self._last = 0, 0.0, last

    def __call__(self, rest: Callable[[], None]) -> int:
        while self.count < self._last:
            rest()
            self.count += 1
            self.now_s += 1.0
        return self.count


def test_work_goes_on_in_slices_and_rests_between_them():
    work = Counting(10)
    slices = Slices(work, clock=lambda: work.now_s)
    assert not slices.go_on(3.0) and work.count == 3
    assert not slices.go_on(4.0) and work.count == 7, "nothing was done between the slices"
    assert slices.go_on(math.inf) and slices.result() == 10
    slices.close()
    assert threading.active_count() == len({*threading.enumerate()} - {slices._thread})


def test_a_thread_that_cannot_start_is_an_error_of_the_work():
    slices = Slices(Counting(1))
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        assert slices.go_on(1.0)
    with pytest.raises(RuntimeError, match="can't start"):
        slices.result()
    slices.close()


def test_errors_are_raised_when_the_result_is_asked_for():
    def fails(rest: Callable[[], None]) -> int:
        rest()
        raise ValueError("no plan")

    slices = Slices(fails)
    assert slices.go_on(math.inf)
    with pytest.raises(ValueError, match="no plan"):
        slices.result()


@pytest.mark.parametrize("slices_before", [0, 1])
def test_work_that_nobody_waits_for_ends(slices_before):
    work, before = Counting(10), threading.active_count()
    slices = Slices(work, clock=lambda: work.now_s)
    for _ in range(slices_before):
        slices.go_on(2.0)
    slices.close()
    assert threading.active_count() == before and work.count == 2 * slices_before


def long_search(rests: int, at_step: int, front: str = "ddp", closes: bool = True) -> tuple[list[str], int]:
    """The plans of a training for which one is searched in slices, and the rests of the search when it is closed, or
    when the model is gone."""
    module, handles, count = build("Mlp"), [], [0]
    found = Proposal(proposal_of(module, {"four": "BlockQuant(bits=4)"}, 2))

    def proposal(*given: Any) -> Any:
        for _ in range(rests):
            given[-1]()
            count[0] += 1
        return found

    with (
        scripted(module, {"eight": "BlockQuant"}, {PLAIN: 1.0, "eight": 0.7, "four": 0.5}, handles, proposal),
        mock.patch.object(searching, "SLICE_S", 0.0),
    ):
        model, handle = tuned_handle(front, module, propose=searching.proposer)
        handles.append(handle)
        policies = train(model, module, range(at_step), lambda _: policy_of(handle))
        if closes:
            handle.close()
    return policies, count[0]


SEARCHED = 1 + TURN + WARMUP + RECORDED + 1 + 2 * TURN
"""The step after which plans are searched: behind a plain turn, recorded steps, and two turns of the uniform plan."""


def test_a_long_search_is_spread_over_steps():
    (policies, rests), (same, _) = values_of(run_ranks(2, long_search, 100, STEPS + 10))
    assert policies == same and rests == 100
    searched = policies[SEARCHED : SEARCHED + searching.SLICES]
    assert {*searched} == {"eight"} and policies[-1] == "four"


@pytest.mark.parametrize(
    ("front", "closes"),
    [("ddp", True), ("module", False), pytest.param("ddp", False, marks=pytest.mark.slow)],
)
def test_closing_ends_the_search_and_so_does_the_end_of_the_model(front, closes):
    """No thread of it is left, which the ranks check."""
    (policies, rests), _ = values_of(run_ranks(2, long_search, 100, SEARCHED + 3, front, closes))
    assert policies[-1] == "eight" and 0 < rests < 100
