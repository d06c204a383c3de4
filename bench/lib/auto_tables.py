"""Markdown tables of training steps with plans that were chosen in the training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.lib.arms import AGAIN, FP16_HOOK, PLAIN, POWERSGD_HOOK
from bench.lib.contenders import AGGRESSIVE, SAFE, rivals_of
from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown, markdown_of_cells
from bench.lib.step_tables import arm_name, bits_per_s, network_name, rate_name, short_time

PATH = RESULTS / "cpu" / "auto.csv"
MODELS = {
    "digits": "digits, 0.15 M",
    "fashion_mnist": "Fashion-MNIST, 0.21 M",
    "transformer_1m": "transformer, 1.1 M",
    "convnet": "convolutions, 2.8 M",
    "embedding": "embedding, 4.3 M",
    "mlp": "perceptron, 7.3 M",
    "transformer_10m": "transformer, 10.0 M",
}
HOOKS = {"fp16 hook": FP16_HOOK, "PowerSGD hook": POWERSGD_HOOK}

StepRow = Mapping[str, str]
Where = tuple[str, str, str]


def steps_table(path: Path = PATH) -> str:
    """A line for every cell: the step of plain DDP, and those of others over it.

    Beside both rules of ``auto`` stands the fastest fixed arm that is at least as accurate.
    """
    head = ["", "plain DDP", "again", *HOOKS]
    for accuracy in (SAFE, AGGRESSIVE):
        head += [f"`auto`, {accuracy}", f"best other, {accuracy}"]
    lines = []
    for where, arms in _cells(read_csv(path)):
        line = dict.fromkeys(head, "")
        line |= {"": _name(where), "plain DDP": short_time(arms[PLAIN]["median_s"]), "again": _ratio(arms, AGAIN)}
        line |= {name: _ratio(arms, hook) for name, hook in HOOKS.items()}
        for accuracy in (SAFE, AGGRESSIVE):
            if (auto := f"auto, {accuracy}") in arms:
                best = _best_of(arms, auto)
                line[f"`auto`, {accuracy}"] = f"**{_ratio(arms, auto)}**"
                line[f"best other, {accuracy}"] = f"{_ratio(arms, best)} {arm_name(best)}"
        lines.append(line)
    return markdown(lines, head)


def choices_table(path: Path = PATH) -> str:
    """A line for every cell: the plans of both rules, and after how many steps each was chosen."""
    rules = (SAFE, AGGRESSIVE)
    lines = []
    for where, arms in _cells(read_csv(path)):
        rows = (arms.get(f"auto, {accuracy}") for accuracy in rules)
        cells = ([chosen_compressors(row["chosen"]), _stands_after(row)] if row else ["", ""] for row in rows)
        lines.append([_name(where), *(text for cell in cells for text in cell)])
    return markdown_of_cells(["", *(text for accuracy in rules for text in (accuracy, "after"))], lines)


def chosen_compressors(chosen: str) -> str:
    """The compressors of a plan that have a percent of the elements or more, each with its share, in Markdown.

    Shares of all elements, to whole percents, are left out.
    """
    found = re.findall(r"(\d+(?:\.\d+)?)% (.+?)(?: through \w+)?(?:, (?=\d)|$)", chosen)
    parts = [(round(float(share)), name) for share, name in found if float(share) >= 1]
    return ", ".join(f"`{name}`" if share >= 99 else f"{share}% `{name}`" for share, name in parts) or chosen


def _stands_after(row: StepRow) -> str:
    """The number of steps after which the last decision was made."""
    return row["decision"].partition(":")[0].removeprefix("step ")


def _best_of(arms: Mapping[str, StepRow], arm: str) -> str:
    """The fastest of the other arms that are at least as accurate."""
    rivals = rivals_of(arm, {name: row["accuracy"] for name, row in arms.items()})
    return min(rivals, key=lambda name: float(arms[name]["ratio_to_plain"]))


def _cells(rows: Iterable[StepRow]) -> list[tuple[Where, dict[str, StepRow]]]:
    """The measured arms of every cell, cells by the number of ranks, the size of the model and the rate."""
    found: dict[Where, dict[str, StepRow]] = {}
    for row in rows:
        if int(row["rounds"]):
            found.setdefault((row["network"], row["model"], row["rate"]), {})[row["arm"]] = row
    models: Sequence[str] = list(MODELS)
    return sorted(found.items(), key=lambda each: (each[0][0], models.index(each[0][1]), bits_per_s(each[0][2])))


def _name(where: Where) -> str:
    network, model, rate = where
    ranks = "" if network == "2" else f", {network_name(network)}"
    return f"{MODELS[model]}, {rate_name(rate)}{ranks}"


def _ratio(arms: Mapping[str, StepRow], arm: str) -> str:
    return f"{float(arms[arm]['ratio_to_plain']):.3g}" if arm in arms else ""
