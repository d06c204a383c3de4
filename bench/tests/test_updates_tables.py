"""Tests of the table of trainings whose updates are averaged."""

from __future__ import annotations

import csv

from bench.lib.updates_tables import accuracy_table


def test_differences_are_those_of_the_same_seeds(tmp_path):
    path = tmp_path / "updates.csv"
    numbers = {"steps": "400", "peak_lr": "0.003", "beta2": "0.95", "ranks": "2", "sent_bits": "0.61"}
    found = {"EFSignSGD, every 10, decay 1": (3.3, 3.1), "EFSignSGD, every 2, decay 0.5": (3.25,), "none": (3.0, 3.1)}
    rows = [
        numbers | {"arm": arm, "seed": str(seed), "bits_per_byte": str(bits)}
        for arm, each in found.items()
        for seed, bits in enumerate(each)
    ]
    rows.append(rows[0] | {"steps": "900", "bits_per_byte": "9"})
    with path.open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    *_, plain, short, long = accuracy_table(400, 3e-3, 0.95, path=path).splitlines()
    assert plain == "| gradients | nothing |  | 0.61 | 3.050 |  |  |"
    assert short == "| updates of 2 steps | `EFSignSGD` | 0.5 | 0.61 | 3.250 | +0.250 | +0.250 |"
    assert long == "| updates of 10 steps | `EFSignSGD` | 1 | 0.61 | 3.200 | +0.150 | +0.300, +0.000 |"
