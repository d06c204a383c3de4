"""Tables of trainings: final accuracies against those of plain DDP, and on links the times to targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from bench.lib.arms import PLAIN
from bench.lib.auto_tables import chosen_compressors
from bench.lib.contenders import AGGRESSIVE, accuracy_of
from bench.lib.rounds import markdown
from bench.lib.step_tables import arm_name, network_name, rate_name

POINTS, SHARE_OF_BITS = 0.005, 0.005  # an aggressive arm may lose half a point of accuracy, or half a percent of bits
LOWER_IS_BETTER = ("bytes_lm",)
RATE = "50mbit"
"""The rate of the links whose trainings are compared with all compressors."""
TRAINED = {
    "digits": "digits",
    "fashion_mnist": "Fashion-MNIST",
    "fashion_mnist_long": "Fashion-MNIST, 10 epochs",
    "bytes_lm": "bytes_lm, bits per byte",
}

Run = Mapping[str, str]


def training_table(rows: Iterable[Run], trained: Sequence[Run] = ()) -> str:
    """A line of Markdown for each arm of each cell, with means over the seeds that plain DDP has as well.

    Args:
        rows: the trainings.
        trained: rows of ``convergence.csv``. The rows of plain DDP, of the same recipes, are further seeds.
    """
    lines = []
    for (model, network, rate), arms in _by_cell(rows).items():
        plain = arms.get(PLAIN, [])
        seeds = {run["seed"] for run in plain}
        further = [
            float(run["bits_per_byte" if model in LOWER_IS_BETTER else "accuracy"])
            for run in trained
            if run["model"] == model and run["compressor"] == "none"
        ]
        for arm, every in arms.items():
            runs = [run for run in every if run["seed"] in seeds]
            if not runs:
                continue
            cell = f"{model}, {network_name(network)}, {rate_name(rate)}"
            line = {"cell": cell, "arm": arm_name(arm), "seeds": len(seeds), "metric": f"{_mean(runs, 'metric'):.4f}"}
            line["holds"] = {None: "", True: "yes", False: "NO"}[holds(model, arm, runs, plain, further)]
            for name, column in (("to the first target", "early_s"), ("to the second target", "late_s")):
                line[name] = _over(runs, plain, column)
            line |= {"CPU": _over(runs, plain, "cpu_s"), "chosen": chosen_compressors(runs[0]["chosen"])}
            lines.append(line)
    columns = (
        "cell",
        "arm",
        "seeds",
        "metric",
        "holds",
        "to the first target",
        "to the second target",
        "CPU",
        "chosen",
    )
    return markdown(lines, columns)


def accuracy_table(trained: Sequence[Run]) -> str:
    """A line for each compressor: the means of all seeds of ``convergence.csv``."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in trained:
        found.setdefault(run["compressor"], {}).setdefault(run["model"], []).append(run)
    column = "bytes per step, Fashion-MNIST"
    lines = []
    for compressor, by_model in found.items():
        runs = by_model.get("fashion_mnist")
        nbytes = _mean(runs, "sent_nbytes_per_step") if runs else 0.0
        name = "plain DDP" if compressor == "none" else f"`{compressor}`"
        cells = {"": name, column: f"{nbytes:,.0f}" if runs else ""}
        for model, title in TRAINED.items():
            cells[title] = _accuracy(model, by_model[model]) if model in by_model else ""
        lines.append(((compressor != "none", -nbytes, compressor), cells))
    return markdown([cells for _, cells in sorted(lines, key=lambda line: line[0])], ["", column, *TRAINED.values()])


def _accuracy(model: str, runs: Sequence[Run]) -> str:
    if model in LOWER_IS_BETTER:
        return f"{_mean(runs, 'bits_per_byte'):.3f}"
    return f"{100 * _mean(runs, 'accuracy'):.2f} %"


def holds(
    model: str, arm: str, runs: Sequence[Run], plain: Sequence[Run], further: Sequence[float] = ()
) -> bool | None:
    """Whether the final accuracy of an arm is good enough; ``None`` for plain DDP itself.

    The mean of an exact or safe arm must be no worse than the worst seed of plain DDP, ``further`` ones included. The
    mean of an aggressive one may be worse than the mean of plain DDP by :data:`POINTS` or :data:`SHARE_OF_BITS`.
    """
    if arm == PLAIN:
        return None
    sign = -1.0 if model in LOWER_IS_BETTER else 1.0
    mean = sign * _mean(runs, "metric")
    if accuracy_of(arm) != AGGRESSIVE:
        return mean >= min(sign * each for each in (*further, *(float(run["metric"]) for run in plain)))
    allowed = SHARE_OF_BITS * _mean(plain, "metric") if model in LOWER_IS_BETTER else POINTS
    return mean >= sign * _mean(plain, "metric") - allowed


def _by_cell(rows: Iterable[Run]) -> dict[tuple[str, str, str], dict[str, list[Run]]]:
    """The runs of every arm, by model, network and rate."""
    found: dict[tuple[str, str, str], dict[str, list[Run]]] = {}
    for row in rows:
        cell = found.setdefault((row["model"], row["network"], row["rate"]), {})
        cell.setdefault(row["arm"], []).append(row)
    return found


def _mean(runs: Sequence[Run], column: str) -> float:
    return statistics.fmean(float(run[column]) for run in runs)


def _over(runs: Sequence[Run], plain: Sequence[Run], column: str) -> str:
    """The mean of a column, and its ratio to plain DDP's; "never" if a run has no value."""
    if not all(run[column] for run in runs):
        return "never"
    text = f"{_mean(runs, column):.2f} s"
    return f"{text} ({_mean(runs, column) / _mean(plain, column):.2f})" if all(run[column] for run in plain) else text
