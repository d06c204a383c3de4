"""The measurement of published policies has a row for each, with distances to the others."""

from __future__ import annotations

import sys

import pytest
import torch

from bench.lib.record import csv_path, read_csv
from bench.planner import published


def run(monkeypatch, *arguments: str) -> dict[tuple[str, str], dict[str, str]]:
    monkeypatch.setattr(sys, "argv", ["published", *arguments])
    published.main()
    return {(row["trace"], row["policy"]): row for row in read_csv(csv_path("policies", torch.device("cpu")))}


@pytest.mark.slow
def test_every_policy_has_a_row(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_OUT", str(tmp_path))
    cell = ("--machines", "espresso-pcie", "--traces", "lstm", "--compressors", "EFSignSGD", "--policies")
    rows = run(monkeypatch, *cell, "none", "all")
    assert set(rows) == {(trace, policy) for trace in ("lstm", "lstm" + published.FIRST) for policy in ("none", "all")}
    assert float(rows["lstm", "none"]["compressed"]) == 0.0 and float(rows["lstm", "all"]["compressed"]) == 1.0
    assert rows["lstm", "none"]["over_none"] == "1.0000" and rows["lstm", "none"]["over_bound"] == ""

    rows = run(monkeypatch, *cell, "cupcake")  # beside the rows of before
    ratio = float(rows["lstm", "cupcake"]["step_ms"]) / float(rows["lstm", "none"]["step_ms"])
    assert len(rows) == 6 and float(rows["lstm", "cupcake"]["over_none"]) == round(ratio, 4) < 0.5
