"""Tests of the tables of trainings on links."""

from __future__ import annotations

import pytest

from bench.lib.training_tables import holds, training_table

SAFE, AGGRESSIVE = "auto, safe", "auto, aggressive"


def runs_of(arm, metrics, model="digits", early_s="2.0", late_s=""):
    common = {"model": model, "network": "2", "rate": "1gbit", "arm": arm, "chosen": "", "cpu_s": "1.0"}
    times = {"early_s": early_s, "late_s": late_s}
    return [common | times | {"seed": str(seed), "metric": str(metric)} for seed, metric in enumerate(metrics)]


@pytest.mark.parametrize(
    ("model", "arm", "metrics", "found"),
    [
        ("digits", "plain", (0.98, 0.99), None),
        ("digits", SAFE, (0.98, 0.981), True),
        ("digits", SAFE, (0.97, 0.985), False),
        ("digits", AGGRESSIVE, (0.98, 0.981), True),
        ("digits", AGGRESSIVE, (0.979, 0.98), False),
        ("bytes_lm", SAFE, (2.9, 2.85), True),
        ("bytes_lm", SAFE, (2.95, 2.9), False),
        ("bytes_lm", AGGRESSIVE, (2.86, 2.86), True),
        ("bytes_lm", AGGRESSIVE, (2.9, 2.87), False),
    ],
)
def test_final_accuracies(model, arm, metrics, found):
    plain = (2.8, 2.9) if model == "bytes_lm" else (0.98, 0.99)
    assert holds(model, arm, runs_of(arm, metrics, model), runs_of("plain", plain, model)) is found


def test_further_seeds_of_plain_ddp_belong_to_its_spread():
    trained = [{"model": "digits", "compressor": name, "accuracy": "0.97"} for name in ("none", "EFSignSGD")]
    rows = [*runs_of("plain", (0.98,)), *runs_of(SAFE, (0.975,))]
    assert "| `auto, safe` | 1 | 0.9750 | NO |" in training_table(rows, trained[1:])
    assert "| `auto, safe` | 1 | 0.9750 | yes |" in training_table(rows, trained)


def test_times_are_relative_to_those_of_plain_ddp():
    rows = [*runs_of("plain", (0.98, 0.99), late_s="4.0"), *runs_of("EFSignSGD", (0.9, 0.99), early_s="1.0")]
    lines = training_table(rows).splitlines()[2:]
    assert lines == [
        "| digits, 2 ranks, 1 Gbit/s | plain DDP | 2 | 0.9850 |  | 2.00 s (1.00) | 4.00 s (1.00) | 1.00 s (1.00) |  |",
        "| digits, 2 ranks, 1 Gbit/s | `EFSignSGD` | 2 | 0.9450 | NO | 1.00 s (0.50) | never | 1.00 s (1.00) |  |",
    ]


def test_arms_are_compared_at_the_seeds_of_plain_ddp():
    rows = [*runs_of("plain", (0.98,)), *runs_of(SAFE, (0.99, 0.1))]
    assert "| `auto, safe` | 1 | 0.9900 | yes |" in training_table(rows)
    assert len(training_table(runs_of(SAFE, (0.99,))).splitlines()) == 2
