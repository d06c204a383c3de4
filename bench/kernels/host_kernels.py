"""Measurement of the host path with pytest-benchmark; run by ``microbench.py``, which chooses the cases.

A round has as many calls as fill two milliseconds, so that the clock's resolution does not matter. A copy of 64 MiB
precedes every round, and the reference, if it is measured, precedes the first few: other work on the machine slows all
of them, so their ratios are steadier than their times. Between the copy and the round there is a pause, in which the
threads of the copy fall asleep, and a call, which wakes those of the host path.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib.cases import Case, yardstick
from bench.lib.timings import Recorder, Timing

ROUND_S, CASE_S = 2e-3, 0.5  # minimum time of a round; approximate time of all rounds of a case
MIN_ROUNDS, MAX_ROUNDS = 7, 50
SETTLE_S = 0.02  # OpenMP's threads, which copy, spin for milliseconds, on the cores of the host path's threads
EAGER_ROUNDS = 3  # a reference takes up to a second, and its factor is large enough for few rounds


class Parameters:
    """A pytest plugin that hands the cases to :func:`test_case`."""

    def __init__(self, cases: Sequence[Case], recorder: Recorder) -> None:
        self.cases, self.the_recorder = cases, recorder

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        threads = sorted({1, torch.get_num_threads()})
        planned = [(case, number) for case in self.cases for number in threads]  # both close in time
        names = ["-".join(map(str, (*dataclasses.astuple(case), number))) for case, number in planned]
        metafunc.parametrize(("case", "threads"), planned, ids=names)

    @pytest.fixture
    def recorder(self) -> Recorder:
        return self.the_recorder

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        # no dot for a test that passes: its row has been printed
        return ("passed", "", "") if report.passed and report.when == "call" else None


def run_on_host(cases: Sequence[Case], recorder: Recorder) -> int:
    """Run a test per case and number of threads; returns pytest's exit code."""
    options = ["--capture=no", "--quiet", "--benchmark-quiet", "--benchmark-disable-gc", "-p", "no:cacheprovider"]
    options += ["--noconftest"]  # the tests' conftest interprets kernels and poisons memory
    return int(pytest.main([str(Path(__file__)), *options], plugins=[Parameters(cases, recorder)]))


def test_case(benchmark, case: Case, threads: int, recorder: Recorder) -> None:
    shortage = recorder.shortage(case)
    if shortage:
        recorder.add(case, threads, None, shortage)
        pytest.skip(shortage)
    torch.set_num_threads(threads)
    call, copy, eager = case.prepare(recorder.device), yardstick(recorder.device), case.eager()
    eager_call = eager.prepare(recorder.device) if eager else None
    call_s, copy_s = (min(seconds(each) for _ in range(3)) for each in (call, copy))
    calls = math.ceil(ROUND_S / call_s)
    rounds = int(CASE_S / (calls * call_s + copy_s))
    copies_s: list[float] = []
    eager_s: list[float] = []

    def between_rounds() -> None:
        copies_s.append(seconds(copy))
        if eager_call and len(eager_s) < EAGER_ROUNDS:
            eager_s.append(seconds(eager_call))
        time.sleep(SETTLE_S)
        call()  # wakes all threads, and fills the caches again with what they can hold

    def one_round() -> None:
        for _ in range(calls):
            call()

    benchmark.pedantic(one_round, setup=between_rounds, rounds=min(max(rounds, MIN_ROUNDS), MAX_ROUNDS))
    case_s = [each / calls for each in benchmark.stats.stats.data]
    for each, each_s in ((eager, eager_s), (case, case_s)):
        if each:
            low, middle, high = statistics.quantiles(each_s, n=4, method="inclusive")
            recorder.add(each, threads, Timing(low, middle, high, statistics.median(copies_s), middle))


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
