"""Tests of the tables of results: accuracies, times, predictions, kernels and averages of updates."""

from __future__ import annotations

from bench.lib.kernel_tables import compressors_table
from bench.lib.prediction_tables import AGGRESSIVE, SAFE, predictions_table
from bench.lib.training_tables import accuracy_table
from bench.lib.updates_tables import accuracy_table as updates_table
from bench.lib.updates_tables import best_table, larger_table, times_table
from bench.lib.updates_tables import steps_table as updates_steps_table


def test_accuracies_are_means_in_the_order_of_bytes():
    common = {"accuracy": "0.9", "bits_per_byte": "2.5"}
    rows = [
        common | {"model": "bytes_lm", "compressor": "QSGD"},
        common | {"model": "fashion_mnist", "compressor": "TopK", "sent_nbytes_per_step": "100"},
        common | {"model": "fashion_mnist", "compressor": "TopK", "sent_nbytes_per_step": "100", "accuracy": "0.8"},
        common | {"model": "fashion_mnist", "compressor": "none", "sent_nbytes_per_step": "4000"},
    ]
    lines = accuracy_table(rows).splitlines()[2:]
    assert lines == ["| plain DDP | 4,000 |  | 90.00 % |  |  |", "| `TopK` | 100 |  | 85.00 % |  |  |", lines[2]]
    assert lines[2] == "| `QSGD` |  |  |  |  | 2.500 |"


def test_times_of_updates_to_a_loss():
    """A target lies between two evaluations, and the metric of a training that has ended early is not shown."""
    rows = [
        {"model": "bytes_lm", "rate": rate, "arm": arm, "metric": "2.9", "curve": curve}
        for rate, arm, curve in (
            ("2mbit", "plain", "50.0:4.0 100.0:3.4"),
            ("1gbit", "plain", "1.0:3.5 2.0:2.9"),
            ("2mbit", "EFSignSGD, every 2", "1.0:3.6 4.0:3.5"),
            ("1gbit", "EFSignSGD, every 2", "1.0:3.6 2.0:3.6"),
            ("50mbit", "TopK", "1.0:3.6"),
        )
    ]
    assert times_table(rows).splitlines()[2:] == [
        "| plain DDP | 100.0 s | 1.0 s | 2.900 |",
        "| `EFSignSGD, every 2` | 4.0 s (25.0) | never | 2.900 |",
    ]


def test_predictions(path_of):
    common = {"model": "mlp", "regret": "0.01", "ratio_to_plain": "1.01", "median_s": "1.5"}
    errors = {"plain": "0.01", "plain again": "0.5", "QSGD": "", "Cast16": "-0.04", SAFE: "0.02", AGGRESSIVE: "0.02"}
    rows = [
        common | {"network": network, "rate": rate, "arm": arm, "error": error}
        for network, rate in (("4", "1gbit"), ("2", "none"), ("2", "1gbit"))
        for arm, error in errors.items()
    ]
    lines = predictions_table(path_of(rows)).splitlines()
    rest = "1.50 s | +1.0 | 2.0 | -4 `Cast16` | 1.0 | 1.0 |"
    assert lines[2:] == [
        f"| perceptron, 7.3 M, 1 Gbit/s, 2 ranks | {rest}",
        f"| perceptron, 7.3 M, not throttled, 2 ranks | {rest}",
        f"| perceptron, 7.3 M, 1 Gbit/s, 4 ranks | {rest}",
    ]


def test_bandwidths(path_of):
    common = {"compressor": "TopK", "implementation": "gckernels", "gb_per_s": "12.34", "percent_of_copy": "56.7"}
    rows = [
        common | {"sources": sources, "direction": direction, "numel": numel, "threads": threads}
        for sources in ("1", "4")
        for direction in ("encode", "decode")
        for numel in (str(2**22), str(2**25))
        for threads in ("1", "2")
    ]
    path = path_of([row | {"factor_over_eager": "7.4"} for row in rows])
    cells = " | ".join(["12.3 (57)"] * 4)
    assert compressors_table(["TopK"], path).splitlines()[2:] == [f"| `TopK` | {cells} | 7 | 7 |"]


def test_differences_of_updates_are_those_of_the_same_seeds(path_of):
    numbers = {"steps": "400", "peak_lr": "0.003", "beta2": "0.95", "ranks": "2", "sent_bits": "0.61"}
    numbers |= {"network": "bytes_lm", "optimizer": "adamw"}
    found = {"EFSignSGD, every 10, decay 1": (3.3, 3.1), "EFSignSGD, every 2, decay 0.5": (3.25,), "none": (3.0, 3.1)}
    rows = [
        numbers | {"arm": arm, "seed": str(seed), "bits": str(bits)}
        for arm, each in found.items()
        for seed, bits in enumerate(each)
    ]
    rows.append(rows[0] | {"steps": "900", "bits": "9"})
    *_, plain, short, long = updates_table(400, 3e-3, 0.95, path=path_of(rows)).splitlines()
    assert plain == "| gradients | nothing |  | 0.61 | 3.050 |  |  |"
    assert short == "| updates of 2 steps | `EFSignSGD` | 0.5 | 0.61 | 3.250 | +0.250 | +0.250 |"
    assert long == "| updates of 10 steps | `EFSignSGD` | 1 | 0.61 | 3.200 | +0.150 | +0.300, +0.000 |"
    without_plain = [row for row in rows if row["arm"] != "none"]
    *_, short, long = updates_table(400, 3e-3, 0.95, path=path_of(without_plain)).splitlines()
    assert short.endswith("| 3.250 |  |  |") and long.endswith("| 3.200 |  |  |")


def test_each_arm_of_updates_has_its_best_rate(path_of):
    usual = {"network": "bytes_gru", "optimizer": "sgd", "beta2": "0.95", "ranks": "2", "steps": "400"}
    losses = {("none", "1e-3"): 3.0, ("none", "2e-3"): 2.5, ("TopK", "1e-3"): 2.75, ("TopK", "2e-3"): 4.0}
    losses |= {("EFSignSGD(magnitude='projection'), every 2, decay 0.8", "2e-3"): 2.25}
    rows = [
        usual | {"arm": arm, "peak_lr": rate, "seed": "0", "bits": str(bits), "sent_bits": "0.5"}
        for (arm, rate), bits in losses.items()
    ]
    rows.append(rows[0] | {"ranks": "4", "bits": "9"})
    rows.append(rows[1] | {"seed": "1", "bits": "2.7"})
    assert best_table(path_of(rows)).splitlines()[2:] == [
        "| plain DDP | 32 | 2.600 |",
        "| gradients: TopK | 0.50 | +0.250 |",
        "| signs, H = 2, decay 0.8 | 0.50 | -0.250 |",
    ]


def test_steps_of_updates_are_parts_of_those_of_plain_ddp(path_of):
    rows = [
        {"model": "mlp", "rate": "2mbit", "arm": arm, "median_s": "2.0", "ratio_to_plain": ratio}
        for arm, ratio in (("TopK, every 2", "0.125"), ("plain", "1.0"))
    ]
    lines = updates_steps_table(path_of(rows)).splitlines()
    assert lines[0] == "|  | mlp, 2mbit |" and lines[2:] == ["| plain DDP | 2.000 s |", "| `TopK, every 2` | 0.125 |"]


def test_more_ranks_and_steps_of_updates(path_of):
    usual = {"network": "bytes_lm", "optimizer": "adamw", "beta2": "0.95", "peak_lr": "0.003", "sent_bits": "0.5"}
    trained = {("none", "4", "400", "0"): 3.0, ("none", "2", "900", "0"): 2.5, ("none", "2", "900", "1"): 2.25}
    trained |= {("TopK, every 2", "2", "900", "0"): 2.625, ("TopK, every 2", "2", "900", "1"): 2.125}
    trained |= {("TopK, every 2", "2", "400", "0"): 9.0}
    rows = [
        usual | {"arm": arm, "ranks": ranks, "steps": steps, "seed": seed, "bits": str(bits)}
        for (arm, ranks, steps, seed), bits in trained.items()
    ]
    lines = larger_table(path_of(rows)).splitlines()
    assert lines[0] == "|  | 4 ranks, 400 steps | 2 ranks, 900 steps |"
    assert lines[2:] == ["| TopK, H = 2 |  | +0.000 (+0.125, -0.125) |"]
