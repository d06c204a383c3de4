"""Tests of the measurements on a GPU, with a fake one: times, bandwidth, clocks, and rows of cases."""

from __future__ import annotations

import os
import sys
import time
import unittest.mock

import pytest
import torch

from bench.gpu import bandwidth
from bench.kernels import gpu_kernels
from bench.lib import nvidia_smi
from bench.lib.budget import Budget
from bench.lib.card import Card
from bench.lib.cases import BOUND, COMPILED, EAGER, FUSED, Case
from bench.lib.timings import Recorder
from bench.tests import fake_cuda
from bench_runs import rows_of


@pytest.fixture
def cuda():
    """The fake GPU."""
    nvidia_smi._once.cache_clear()
    with fake_cuda.installed():
        yield
    nvidia_smi._once.cache_clear()


# -------------------------------------------------------------------- the card


def test_times_are_those_of_graphs_where_calls_can_be_captured(cuda):
    card = Card()
    ran = []
    timing = card.time([lambda: ran.append(1), lambda: ran.append(2)])
    assert timing.how == "graph" and 0 < timing.low_s <= timing.median_s <= timing.high_s
    assert ran == [1, 2] * 12  # two warm-ups and one capture, with four turns each
    before = torch.cuda.current_stream()
    assert card.time([torch.cuda.synchronize]).how == "stream"
    assert torch.cuda.current_stream() is before


def test_calls_that_wait_for_the_gpu_are_not_captured(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: pytest.fail("torch does not recover from this"))
    assert Card().time([torch.cuda.Stream().synchronize]).how == "stream"
    assert torch.cuda.get_sync_debug_mode() == 0


def test_sets_of_tensors_exceed_the_cache(cuda):
    card = Card()
    assert card.num_sets(fake_cuda.L2_NBYTES) == 4 and card.num_sets(100 * fake_cuda.L2_NBYTES) == 2
    assert card.num_sets(1) == 64 and card.stays_in_l2(1, 64) and not card.stays_in_l2(fake_cuda.L2_NBYTES, 4)
    assert card.num_sets(fake_cuda.FREE_NBYTES) == 1  # more do not fit


def test_time_before_a_round_does_not_count(cuda):
    card, ran = Card(), []
    seconds = card.seconds(lambda: ran.append("work"), 2, before=lambda: (ran.append("before"), time.sleep(0.2)))
    assert ran == ["before", "work"] * 2 and max(seconds) < 0.2
    card.clean_l2()


def test_bandwidth_is_measured_by_size(cuda, out, monkeypatch):
    monkeypatch.setattr(bandwidth, "SIZES_NBYTES", (2**8, 2**18))
    result = bandwidth.measure(Budget(100))
    assert result.ok and len(result.lines) == 4
    rows = rows_of(out / "bandwidth.csv")
    assert {(row["operation"], row["nbytes"], row["in_l2"]) for row in rows} == {
        (operation, str(nbytes), in_l2)
        for operation in bandwidth.OPERATIONS
        for nbytes, in_l2 in ((2**8, "yes"), (2**18, ""))
    }
    assert all(float(row["gb_per_s"]) > 0 and row["sm_clock_mhz"] == "1980" for row in rows)
    short = Budget(2)
    bandwidth.measure(short)
    assert short.left_out == ["256 bytes", "262144 bytes"]


def test_nvidia_smi_is_called_if_it_is_installed(tool, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert nvidia_smi.query("name") == {}
    tool("nvidia-smi", "echo Some Card, 580.1")
    assert nvidia_smi.query("name", "driver_version") == {"name": "Some Card", "driver_version": "580.1"}
    tool("nvidia-smi", "exit 9")
    assert nvidia_smi.query("name") == {}


def test_a_clock_that_cannot_be_read_is_left_out(cuda, monkeypatch):
    class NVMLError(Exception):
        """As in the package that torch reads clocks with."""

    monkeypatch.setattr(torch.cuda, "clock_rate", unittest.mock.Mock(side_effect=NVMLError("Not Supported")))
    assert nvidia_smi.columns()["sm_clock_mhz"] == ""


# -------------------------------------------------------------------- cases


@pytest.fixture
def bench(cuda, out):
    """A ``Bench`` that writes into the results folder."""
    return gpu_kernels.Bench(Recorder(torch.device("cuda"), keep=False))


def test_a_case_is_compared_with_a_copy_of_as_many_bytes(bench, out):
    cases = [Case("EFSignSGD", "decode", sources, FUSED, 2**15) for sources in (1, 8)]
    bench.run(cases, Budget(100))
    rows = rows_of(out / "microbench.csv")
    assert [row["sources"] for row in rows] == ["1", "8"]
    assert all(row["timing"] == "graph" and row["sets"] == "2" and not row["in_l2"] for row in rows)
    for case, nbytes in zip(cases, sorted(bench._copies_s), strict=True):
        assert case.moved_nbytes <= nbytes <= 9 / 8 * case.moved_nbytes


def test_small_calls_cost_the_host(bench, out):
    bench.run([Case("EFSignSGD", "encode", 1, which, 2**14) for which in (FUSED, BOUND)], Budget(100))
    rows = rows_of(out / "microbench.csv")
    assert [row["implementation"] for row in rows] == [FUSED, BOUND]
    assert all(float(row["host_us_per_call"]) > 0 and row["sets"] == "1" for row in rows)
    line = gpu_kernels.table(rows)[1]
    assert line.split() == ["EFSignSGD", *(row["host_us_per_call"] for row in rows)]


def test_peers_are_named_in_the_rows_of_ours(bench, out, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    bench.run([Case("EFSignSGD", "encode", 1, which, 2**15) for which in (COMPILED, EAGER, FUSED)], Budget(100))
    rows = rows_of(out / "microbench.csv")
    (ours,) = (row for row in rows if row["implementation"] == FUSED)
    assert ours["factor_over_eager"] and ours["factor_over_compiled"]
    assert gpu_kernels.factors(rows)[0].split()[:2] == ["EFSignSGD", "encode"]


def test_a_case_that_fails_leaves_a_note(bench, out, monkeypatch):
    monkeypatch.setattr(Case, "on", lambda *_: 1 / 0)
    bench.run([Case("EFSignSGD", "encode", 1, FUSED, 2**15)], Budget(100))
    assert [row["note"] for row in rows_of(out / "microbench.csv")] == [
        "not measured: ZeroDivisionError: division by zero"
    ]


def test_after_a_broken_connection_the_process_restarts(bench, out, monkeypatch):
    cases = [Case("EFSignSGD", "encode", 1, FUSED, 2**15)]

    def on(case: Case, tensors: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    begun: list[object] = []
    for name in ("BENCH_FIRST_CASE", "BENCH_DEADLINE"):
        monkeypatch.setenv(name, "0")  # so that monkeypatch restores them
    monkeypatch.setattr(Case, "on", on)
    monkeypatch.setattr(os, "execv", lambda *command: begun.append((os.environ["BENCH_FIRST_CASE"], command)))
    bench.run(cases, Budget(100))
    assert begun == [("1", (sys.executable, [sys.executable, *sys.argv]))]
    monkeypatch.setattr(Case, "on", lambda *_: begun.append("the first case is not measured again"))
    bench.run(cases, Budget(100))
    assert len(begun) == 1


def test_cases_without_time_are_counted(bench):
    budget = Budget(0)
    bench.run(gpu_kernels.peer_cases(), budget)
    count = len(gpu_kernels.peer_cases())
    assert budget.left_out == [f"{count} of {count} cases"]
