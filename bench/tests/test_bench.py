"""Tests of how the benchmarks merge, judge and draw results."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from bench.lib import record

KEY = ("model", "seed")


def test_merging_replaces_only_rows_with_the_same_key(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    cpu = torch.device("cpu")
    record.merge_csv("runs", cpu, [{"model": "a", "seed": seed, "value": 1} for seed in (1, 0)], KEY)
    path = record.merge_csv("runs", cpu, [{"model": "a", "seed": 1, "value": math.nan}], KEY)
    found = record.read_csv(path)
    assert [(row["model"], row["seed"], row["value"]) for row in found] == [("a", "0", "1"), ("a", "1", "nan")]
    assert all(row["torch"] == torch.__version__ for row in found)
    assert [file.name for file in path.parent.iterdir()] == ["runs.csv"]


def test_pareto_front():
    pytest.importorskip("matplotlib")
    from bench.lib.pareto import pareto_front

    points = [(4.0, 0.9), (1.0, 0.5), (2.0, 0.4), (2.0, 0.8), (0.5, math.nan), (3.0, 0.8)]
    assert pareto_front(points, higher_is_better=True) == [(1.0, 0.5), (2.0, 0.8), (4.0, 0.9)]
    assert pareto_front(points, higher_is_better=False) == [(1.0, 0.5), (2.0, 0.4)]
    assert pareto_front([(1.0, math.nan)], higher_is_better=True) == []


@pytest.mark.parametrize(
    ("value", "steps", "status"),
    [
        pytest.param(0.99, 660, 0, id="within the margin"),
        pytest.param(0.5, 660, 1, id="worse"),
        pytest.param(math.nan, 660, 1, id="diverged"),
        pytest.param(0.99, 330, 2, id="trained for other steps than plain DDP"),
    ],
)
def test_exit_status_tells_whether_margins_hold(value, steps, status):
    pytest.importorskip("sklearn")
    from bench.training.convergence import judge

    common = {"model": "digits", "seed": "0", "sent_nbytes_per_step": "16", "mean_step_s": "0.01"}
    rows = [
        common | {"compressor": "none", "accuracy": "0.99", "steps": "660"},
        common | {"compressor": "EFSignSGD", "accuracy": str(value), "steps": str(steps)},
    ]
    args = argparse.Namespace(models=["digits"], compressors=["EFSignSGD"], seeds=[0])
    assert judge(rows, args) == status


def test_picture_shows_runs_that_diverged(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.lib.pareto import draw_convergence

    lines = ["model,compressor,seed,world_size,accuracy,bits_per_byte,sent_nbytes_per_step"]
    lines += [
        f"digits,{name},0,2,{value},,{nbytes}"
        for name, value, nbytes in (
            ("none", 0.99, 1000),
            ("Cast16", 0.98, 500),
            ("EFSignSGD", "nan", 32),
            ("ChunkTopK", 0.1, 16),
        )
    ]
    lines += ["bytes_lm,EFSignSGD,0,2,nan,nan,32"]
    path = tmp_path / "convergence.csv"
    path.write_text("\n".join(lines))
    picture = draw_convergence(path)
    assert picture == tmp_path / "convergence.png"
    assert 1000 < picture.stat().st_size < 150_000
