"""Tests of measurements in cells: what a resumed run leaves out, and what it measures when a cell fails."""

from __future__ import annotations

import argparse
import sys

import pytest

from bench.lib import cells, record
from bench.lib.cells import Cell, Measurement
from gckernels.sync.lab import Network

CELLS = [Cell(Network(2, rate), {"rate": rate, "rounds": 5}, ("plain", "Cast16")) for rate in ("1gbit", "none")]
MEASUREMENT = Measurement("some", ("rate", "arm"), ("arm",), lambda args: CELLS, lambda args, cell: [])


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The cells whose ranks are started; those at "1gbit" fail, the others write a row for each arm."""
    started = []

    def run(cell):
        started.append((cell.network.rate, cell.arms))
        if cell.network.rate == "1gbit":
            return [0, 1]
        rows = [cell.columns | {"arm": arm} for arm in cell.arms]
        record.merge_csv("some", cells.CPU, rows, MEASUREMENT.key)
        return [0, 0]

    monkeypatch.setenv("BENCH_OUT", str(tmp_path))
    monkeypatch.setattr(cells, "_run", run)
    return started


def run(**options):
    return cells.main(MEASUREMENT, argparse.Namespace(**{"resume": False, "rounds": 5} | options))


def test_a_failed_cell_does_not_end_the_run(measured, capsys):
    assert run() == 1
    arms = ("plain", "Cast16")
    assert measured == [("1gbit", arms), ("none", arms)]
    assert capsys.readouterr().err == "not measured: rate 1gbit, rounds 5\n"


def test_a_resumed_run_leaves_out_what_is_there(measured):
    run()
    run(resume=True)
    assert [rate for rate, _ in measured] == ["1gbit", "none", "1gbit"]
    run()
    assert len(measured) == 5  # without the option everything is measured again


def test_only_missing_arms_are_measured():
    here = record.environment(cells.CPU)
    rows = [{"rate": "none", "rounds": "5", "arm": "plain"} | here]
    assert [(cell.network.rate, cell.arms) for cell in cells.unmeasured(CELLS, rows)] == [
        ("1gbit", ("plain", "Cast16")),
        ("none", ("Cast16",)),
    ]


@pytest.mark.parametrize("other", [{"torch": "1.0"}, {"device": "another"}, {"rounds": "6"}])
def test_other_versions_and_settings_are_measured_again(other):
    here = record.environment(cells.CPU)
    rows = [{"rate": "none", "rounds": "5", "arm": arm} | here | other for arm in ("plain", "Cast16")]
    assert cells.unmeasured(CELLS[1:], rows) == CELLS[1:]


def test_another_date_or_command_is_no_reason_to_measure_again(monkeypatch):
    here = record.environment(cells.CPU) | {"date": "2000-01-01", "command": "python"}
    rows = [{"rate": "none", "rounds": "5", "arm": arm} | here for arm in ("plain", "Cast16")]
    monkeypatch.setattr(sys, "argv", ["another"])
    assert cells.unmeasured(CELLS[1:], rows) == []
