"""Test of the benchmark of overlap, over loopback: its arms differ only in parts and channels."""

from __future__ import annotations

import argparse

import pytest

from bench.sync import overlap
from ranks import run_ranks, values_of

NUMEL = 2**20
ALL = NUMEL + overlap.SMALL * overlap.SMALL_SHAPE[0] * overlap.SMALL_SHAPE[1]


@pytest.mark.slow
def test_every_arm_is_measured():
    options = {"rate": "none", "world_size": 2, "numel": NUMEL, "rounds": 2}
    args = argparse.Namespace(compressors=["EFSignSGD"], programs=["ring"], **options)
    (cell,) = overlap.cells_of(args)
    rows, others = values_of(run_ranks(2, overlap.measure, args, cell))
    assert others == []
    assert [row["arm"] for row in rows] == list(cell.arms)
    assert list(cell.arms) == [
        *("1 part, 1 channel", "1 part, 2 channels", "1 part, 4 channels"),
        *("2 parts, 1 channel", "2 parts, 2 channels", "2 parts, 4 channels"),
        *("4 parts, 1 channel", "4 parts, 2 channels", "4 parts, 4 channels"),
        "1 part, 1 channel, again",
    ]
    assert rows[0]["ratio_to_first"] == "1.000"
    for row in rows:
        assert 0 < float(row["compute_s"]) <= float(row["either_s"])
        assert 0 < float(row["communicate_s"]) <= float(row["either_s"])
        assert 0 <= float(row["hidden_share"]) <= 1
        assert row["plan_nbytes"] > row["residual_nbytes"] >= 4 * ALL
        assert ALL * 5 / 32 < float(row["sent_nbytes_per_step"]) < ALL / 6  # a bit per element, and four bytes per 128
    # only a few headers depend on how the parameter is cut
    sent = [float(row["sent_nbytes_per_step"]) for row in rows]
    assert max(sent) < 1.01 * min(sent)
