"""The Markdown table of models whose updates are averaged: what they send, and their accuracy."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.lib.arms import AGAIN
from bench.lib.arms import PLAIN as PLAIN_DDP
from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown_of_cells
from bench.lib.step_tables import rate_name
from gckernels import sync

UPDATES, STEPS = RESULTS / "cpu" / "updates.csv", RESULTS / "cpu" / "updates_steps.csv"
TIMED_RATES = ("2mbit", "20mbit", "200mbit", "1gbit")
"""The rates of the links over which trainings with updates are timed."""
USUAL_STEPS = ("400", "1404")
"""The numbers of steps of the trainings that are compared between networks."""
PLAIN = "none"
SIGNS = "EFSignSGD(block=1024, magnitude='projection')"
FEW = (
    *(PLAIN, "BlockQuant", "BlockQuant(bits=4)", "EFSignSGD", "EFSignSGD, decay 0.5", f"{SIGNS}, decay 0.5"),
    *("Identity, direction", f"{SIGNS}, direction, decay 0.5", "Identity, every 1, short steps, decay 1"),
    *(f"{SIGNS}, every 1, decay 0.8", f"{SIGNS}, every 2, decay 0.8", "EFSignSGD(block=1024), every 2, decay 0.8"),
    f"{SIGNS}, every 2 growing, decay 0.8",
    *("Identity, every 4, short steps, decay 1", f"{SIGNS}, every 4, short steps, decay 1"),
)
"""The arms whose differences are shown for each seed."""


class Parts(NamedTuple):
    """The parts of the name of an arm.

    Attributes:
        spec: the compressor.
        every: the number of steps of its rounds; 0 for gradients, which have none.
        is_direction: whether gradients are replaced by Adam's directions (``sync.AdamDirection``).
        grows: whether rounds grow as the learning rate falls (``sync.quadratic_rounds``).
        both: whether they follow it on both sides of its highest value.
        is_short: whether steps have no factors (``scale_steps``), where they have by default.
        setting: the decay or delay that ends the name; empty if there is none.
    """

    spec: str
    is_direction: bool
    every: int
    grows: bool
    both: bool
    is_short: bool
    setting: str

    def rounds(self, rates: Sequence[float]) -> int | dict[int, int]:
        """The rounds of a training with some learning rates."""
        return sync.quadratic_rounds(rates, self.every, both=self.both) if self.grows else self.every


def parts_of(arm: str) -> Parts:
    """The parts of the name of an arm."""
    rounds = r"(?:, every (\d+)( growing)?( both ways)?(, short steps)?)?"
    found = re.fullmatch(rf"(.*?)(, direction)?{rounds}(?:, (?:decay|delay) ([\d.]+))?", arm)
    assert found is not None
    spec, direction, every, grows, both, is_short, setting = found.groups()
    return Parts(spec, bool(direction), int(every or 0), bool(grows), bool(both), bool(is_short), setting or "")


def accuracy_table(
    steps: int,
    peak_lr: float,
    beta2: float,
    ranks: int = 2,
    network: str = "bytes_lm",
    optimizer: str = "adamw",
    only: Collection[str] = (),
    path: Path = UPDATES,
) -> str:
    """A row for every arm, or for those in ``only``: the loss in bits after training, and its distance to plain DDP.

    Differences are of the same seeds.
    """
    bits: dict[str, dict[str, float]] = {}
    sent: dict[str, str] = {}
    for row in read_csv(path):
        numbers = int(row["steps"]), float(row["peak_lr"]), float(row["beta2"]), int(row["ranks"])
        names = row["network"], row["optimizer"]
        if (*numbers, *names) == (steps, peak_lr, beta2, ranks, network, optimizer):
            bits.setdefault(row["arm"], {})[row["seed"]] = float(row["bits"])
            sent[row["arm"]] = row["sent_bits"]
    table = []
    for arm, found in sorted(bits.items(), key=lambda item: _order(item[0])):
        if only and arm not in only:
            continue
        plain = {} if arm == PLAIN else bits.get(PLAIN, {})
        differences = [found[seed] - plain[seed] for seed in found if seed in plain]
        change = f"{statistics.fmean(differences):+.3f}" if differences else ""
        each = ", ".join(f"{one:+.3f}" for one in differences)
        parts = parts_of(arm)
        what = "Adam's directions" if parts.is_direction else "gradients"
        if parts.every:
            what = f"updates of {parts.every}{' short' if parts.is_short else ''} step{'s' if parts.every > 1 else ''}"
            what += f"{' and more' if parts.grows else ''}{', both ways' if parts.both else ''}"
        name = "nothing" if arm == PLAIN else f"`{parts.spec}`"
        table.append([what, name, parts.setting, sent[arm], f"{statistics.fmean(found.values()):.3f}", change, each])
    unit = "bits per byte" if network.startswith("bytes") else "bits per image"
    head = ["averaged", "compressed by", "decay", "bits sent per element and step", unit, "mean difference"]
    return markdown_of_cells([*head, "of each seed"], table)


def steps_table(path: Path = STEPS) -> str:
    """A row for every arm, with the time of a step for each model and rate, over plain DDP's in the same run."""
    found: dict[str, dict[str, str]] = {}
    for row in read_csv(path):
        cell = f"{row['model']}, {row['rate']}"
        ratio = float(row["ratio_to_plain"])
        shown = f"{float(row['median_s']):.3f} s" if row["arm"] == PLAIN_DDP else f"{ratio:.3f}"
        found.setdefault(row["arm"], {})[cell] = shown
    columns = list(dict.fromkeys(cell for cells in found.values() for cell in cells))
    names = {PLAIN_DDP: "plain DDP", AGAIN: "plain DDP again"}
    arms = [arm for arm in found if arm in names] + [arm for arm in found if arm not in names]
    lines = ([names.get(arm, f"`{arm}`"), *(found[arm].get(cell, "") for cell in columns)] for arm in arms)
    return markdown_of_cells(["", *columns], lines)


def times_table(rows: Iterable[Mapping[str, str]], model: str = "bytes_lm", target: float = 3.5) -> str:
    """A row for every arm, with the seconds until a training is as good as a target, for each rate of the links.

    Behind them stands how many times as fast as plain DDP that is. The last column is the metric at the end of the
    training at the highest rate.

    Args:
        rows: the rows of ``time_to_accuracy.csv``.
        model: the model, whose metric is better if it is lower.
        target: the target.
    """
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if row["model"] == model and row["rate"] in TIMED_RATES:
            found.setdefault(row["arm"], {})[row["rate"]] = row
    rates = [rate for rate in TIMED_RATES if any(rate in of_arm for of_arm in found.values())]
    lines = []
    for arm in sorted(found, key=lambda arm: arm != PLAIN_DDP):
        of_arm, cells = found[arm], []
        for rate in rates:
            seconds, plain = (_seconds_to(target, found[each].get(rate)) for each in (arm, PLAIN_DDP))
            text = "" if rate not in of_arm else "never" if seconds is None else f"{seconds:.1f} s"
            cells.append(f"{text} ({plain / seconds:.1f})" if seconds and plain and arm != PLAIN_DDP else text)
        last = of_arm.get(rates[-1])
        name = "plain DDP" if arm == PLAIN_DDP else f"`{arm}`"
        lines.append([name, *cells, "" if last is None else f"{float(last['metric']):.3f}"])
    return markdown_of_cells(["", *map(rate_name, rates), "at the end"], lines)


def _seconds_to(target: float, row: Mapping[str, str] | None) -> float | None:
    """The seconds of training until an evaluation was as good as a target; ``None`` if there was none."""
    points = [] if row is None else [tuple(map(float, point.split(":"))) for point in row["curve"].split()]
    return next((seconds for seconds, metric in points if metric <= target), None)


Results = dict[str, tuple[float, dict[str, float]]]
"""For each arm the bits that it sends per element and step, and the loss of each seed."""


def to_plain(results: Results, arm: str) -> list[float]:
    """The differences of an arm's losses to those of plain DDP, for each seed that both have."""
    plain = results[PLAIN][1]
    return [loss - plain[seed] for seed, loss in results[arm][1].items() if seed in plain]


def best_rates(rows: Sequence[Mapping[str, str]]) -> dict[str, Results]:
    """The results of all arms by network and optimizer, each with the rate that was best for it with the first seed.
    Only trainings with the usual number of steps, ranks and ``beta2``."""
    usual = [row for row in rows if (row["ranks"], row["beta2"]) == ("2", "0.95") and row["steps"] in USUAL_STEPS]
    found: dict[str, Results] = {}
    for name in dict.fromkeys((row["network"], row["optimizer"]) for row in usual):
        results: Results = {}
        for arm in dict.fromkeys(row["arm"] for row in usual if (row["network"], row["optimizer"]) == name):
            of_arm = [row for row in usual if (row["network"], row["optimizer"], row["arm"]) == (*name, arm)]
            rates = {row["peak_lr"]: float(row["bits"]) for row in of_arm if row["seed"] == "0"}
            best = min(rates, key=lambda rate: rates[rate])
            at_best = [row for row in of_arm if row["peak_lr"] == best]
            losses = {row["seed"]: float(row["bits"]) for row in at_best}
            results[short_name(arm)] = float(at_best[0]["sent_bits"]), losses
        found[" with ".join(name)] = results
    return found


def best_table(path: Path = UPDATES) -> str:
    """A row for every arm of several networks, with the mean difference of its loss to plain DDP's for each.

    Differences are of the same seeds, and both have the rates that are best for them. Bits are those sent with the
    first network.
    """
    found = best_rates(read_csv(path))
    arms = [arm for arm in dict.fromkeys(arm for results in found.values() for arm in results) if arm != PLAIN]
    arms = [arm for arm in arms if sum(arm in results for results in found.values()) >= min(2, len(found))]
    sent = {arm: f"{results[arm][0]:.2f}" for results in reversed(found.values()) for arm in results}
    plain = (statistics.fmean(results[PLAIN][1].values()) for results in found.values())
    lines = [["plain DDP", "32", *(f"{loss:.3f}" for loss in plain)]]
    for arm in sorted(arms, key=lambda arm: -float(sent[arm])):
        differences = (
            f"{statistics.fmean(to_plain(results, arm)):+.3f}" if arm in results else "" for results in found.values()
        )
        lines.append([arm, sent[arm], *differences])
    return markdown_of_cells(["", "bits sent", *found], lines)


def larger_table(path: Path = UPDATES) -> str:
    """A row for every arm with more ranks or steps than usual, with the difference of its loss to plain DDP's.

    In brackets are the differences of each seed. All have the usual ``beta2``, and the rate 3e-3.
    """
    found: dict[tuple[int, int], Results] = {}
    for row in read_csv(path):
        where, settings = (int(row["ranks"]), int(row["steps"])), (row["network"], row["optimizer"], row["beta2"])
        if settings == ("bytes_lm", "adamw", "0.95") and float(row["peak_lr"]) == 3e-3 and where != (2, 400):
            arm = found.setdefault(where, {}).setdefault(short_name(row["arm"]), (float(row["sent_bits"]), {}))
            arm[1][row["seed"]] = float(row["bits"])
    columns = sorted(found, key=lambda where: (where[1], where[0]))
    lines = []
    for name in dict.fromkeys(each for where in columns for each in found[where] if each != PLAIN):
        cells = []
        for where in columns:
            each = to_plain(found[where], name) if name in found[where] else []
            seeds = ", ".join(f"{one:+.3f}" for one in each)
            cells.append(f"{statistics.fmean(each):+.3f} ({seeds})" if each else "")
        lines.append([name, *cells])
    return markdown_of_cells(["", *(f"{ranks} ranks, {steps} steps" for ranks, steps in columns)], lines)


def short_name(arm: str) -> str:
    """The name of an arm in pictures, such as ``"signs, H = 2"``."""
    parts = parts_of(arm)
    spec, every, decay = parts.spec, parts.every, parts.setting
    names = {"BlockQuant(bits=4)": "4 bits", "BlockQuant": "8 bits", "Identity": "exact"}
    name = names.get(spec, spec)
    if spec.startswith("EFSignSGD"):
        name = "signs" if "projection" in spec else "signs by the mean"
    if every:
        name += f", H = {every}{' and more' if parts.grows else ''}{', both ways' if parts.both else ''}"
        name += ", short steps" if parts.is_short else ""
    if decay:
        name += f", decay {decay}"
    if every or arm == PLAIN:
        return name
    return f"{'directions' if parts.is_direction else 'gradients'}: {name}"


def _order(arm: str) -> tuple[float, bool, str]:
    """A key that sorts arms: gradients, then updates by the number of steps, each without compression first."""
    parts = parts_of(arm)
    part = (parts.is_direction + parts.grows) / 2 + parts.both / 4
    return parts.every + part, parts.spec not in (PLAIN, "Identity"), arm
