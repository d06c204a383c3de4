"""Measurement of the host path: the cases of ``lib/cases.py``, with one thread and with torch's number of threads.

A round has as many calls as fill two milliseconds, so that the clock's resolution does not matter. A copy of 64 MiB
precedes every round, and the reference, if it is measured, precedes the first few: other work on the machine slows all
of them, so their ratios are steadier than their times. Between the copy and the round there is a pause, in which the
threads of the copy fall asleep, and a call, which wakes those of the host path. Python's garbage is not collected
meanwhile.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Sequence

import torch

from bench.lib.cases import Case, yardstick
from bench.lib.rounds import SETTLE_S, seconds
from bench.lib.timings import Recorder, Timing

ROUND_S, CASE_S = 2e-3, 0.5  # minimum time of a round; approximate time of all rounds of a case
MIN_ROUNDS, MAX_ROUNDS = 7, 50
EAGER_ROUNDS = 3  # a reference takes up to a second, and its factor is large enough for few rounds


def run(cases: Sequence[Case], recorder: Recorder) -> int:
    """Measure all cases; returns an exit code, 1 if one of them could not be measured."""
    threads = sorted({1, torch.get_num_threads()})
    gc.disable()
    notes = [
        recorder.measure(case, number, functools.partial(timed, case, number, recorder))
        for case in cases
        for number in threads  # both close in time
    ]
    gc.enable()
    return int(any(notes))


def timed(case: Case, threads: int, recorder: Recorder) -> Timing:
    """The times of a case; the row of its reference, if that is measured, is written before."""
    torch.set_num_threads(threads)
    call, copy, eager = case.prepare(recorder.device), yardstick(recorder.device), case.eager()
    eager_call = eager.prepare(recorder.device) if eager else None
    call_s, copy_s = (min(seconds(each) for _ in range(3)) for each in (call, copy))
    calls = math.ceil(ROUND_S / call_s)
    rounds = int(CASE_S / (calls * call_s + copy_s))
    case_s: list[float] = []
    copies_s: list[float] = []
    eager_s: list[float] = []

    def one_round() -> None:
        for _ in range(calls):
            call()

    for number in range(min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)):
        copies_s.append(seconds(copy))
        if eager_call and number < EAGER_ROUNDS:
            eager_s.append(seconds(eager_call))
        time.sleep(SETTLE_S)
        call()  # wakes all threads, and fills the caches again with what they can hold
        case_s.append(seconds(one_round) / calls)
    if eager:
        recorder.add(eager, threads, _timing(eager_s, copies_s))
    return _timing(case_s, copies_s)


def _timing(calls_s: Sequence[float], copies_s: Sequence[float]) -> Timing:
    low, middle, high = statistics.quantiles(calls_s, n=4, method="inclusive")
    return Timing(low, middle, high, statistics.median(copies_s), middle)
