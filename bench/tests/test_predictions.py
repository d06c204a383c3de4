"""The comparison of predicted and measured steps: its rows."""

from __future__ import annotations

import pytest

from bench.sync.predictions import ARMS, AUTO, Planned, _row
from gckernels import sync

SECONDS = {name: [0.2, 0.2, 0.4] for name in ARMS} | {"BlockQuant": [0.1, 0.1, 0.2], "EFSignSGD": [0.05, 0.05, 0.1]}


def row(name: str, predicted_s: float | None = 0.21) -> dict[str, object]:
    return _row(name, Planned(sync.Plan((), sync.Topology(2)), predicted_s, 0.0), SECONDS)


def test_errors_are_relative_to_the_median_step():
    assert row("plain")["error"] == "+0.050" and row("BlockQuant", 0.08)["error"] == "-0.200"
    assert row("plain", None)["error"] == row("plain", None)["predicted_s"] == ""


@pytest.mark.parametrize(("name", "regret"), [("auto, safe", "1.000"), ("auto, aggressive", "3.000")])
def test_regret_compares_with_the_best_plan_of_the_accuracy(name, regret):
    assert row(name)["regret"] == regret
    assert {each for each in ARMS if row(each)["regret"]} == set(AUTO)


def test_every_arm_has_an_accuracy():
    found = {name: row(name)["accuracy"] for name in ARMS}
    assert found["plain again"] == "exact" and found["BlockQuant through alltoall"] == "safe"
    assert found["EFSignSGD through alltoall"] == found["auto, aggressive"] == "aggressive"
