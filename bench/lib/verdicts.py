"""The bars for attachments that choose their plan, and what the rows of ``bench.sync.auto`` say of them.

A bar is met, missed, or open: where it lies within two standard errors of the measurement, more rounds must decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from bench.lib.arms import AGAIN, FP16_HOOK, PLAIN, POWERSGD_HOOK
from bench.lib.contenders import AGGRESSIVE, SAFE, TUNED, accuracy_of, rivals_of
from bench.lib.rounds import markdown

AS_FAST, AS_FAST_QUIET, QUIET = 0.98, 0.99, 0.01  # times the speed of plain DDP; noise below which the second holds
OF_BEST, IDLE, ATTACH_S, PAUSE_S = 1.03, 1.005, 10.0, 1.0
LARGE, SLOW_RATES = "transformer_10m", ("50mbit", "200mbit")
SPEEDUPS = {
    (f"auto, {SAFE}", PLAIN): 3.0,
    (f"auto, {SAFE}", FP16_HOOK): 1.5,
    (f"auto, {AGGRESSIVE}", PLAIN): 8.0,
    (f"auto, {AGGRESSIVE}", POWERSGD_HOOK): 1.5,
}

StepRow = Mapping[str, str]
Where = tuple[str, str, str]


class Verdict(Enum):
    """The outcome of a comparison with a bar."""

    MET = "met"
    OPEN = "open"
    MISSED = "missed"


@dataclass(frozen=True)
class Finding:
    """A comparison with a bar in one cell.

    Attributes:
        bar: what is compared.
        limit: the value that it may not exceed.
        cell: model, network and rate.
        arm: the arm that is judged.
        value: what was measured.
        error: its standard error.
        remark: what the value is relative to, or what was chosen.
    """

    bar: str
    limit: float
    cell: str
    arm: str
    value: float
    error: float
    remark: str

    @property
    def verdict(self) -> Verdict:
        if self.value <= self.limit:
            return Verdict.MET
        return Verdict.OPEN if self.value - 2 * self.error <= self.limit else Verdict.MISSED


def findings_of(rows: Iterable[StepRow]) -> list[Finding]:
    """The comparisons of all cells with all bars, the worst of each bar first."""
    found = [finding for cell, arms, arm in _tuned(rows) for finding in _in(cell, arms, arm)]
    return sorted(found, key=lambda finding: (finding.bar, -finding.value / finding.limit))


def judged(rows: Iterable[StepRow]) -> tuple[str, bool]:
    """A table of the bars, with everything that does not meet its bar, and whether a bar is missed."""
    found = findings_of(rows)
    lines = []
    for bar in dict.fromkeys(finding.bar for finding in found):
        mine = [finding for finding in found if finding.bar == bar]
        counts = {verdict: sum(finding.verdict is verdict for finding in mine) for verdict in Verdict}
        worst = mine[0]
        line = {"bar": bar} | {verdict.value: str(count) for verdict, count in counts.items()}
        lines.append(line | {"worst": f"{worst.value:.3f}", "in": f"{worst.cell}, {worst.arm}: {worst.remark}"})
    table = markdown(lines, ("bar", *(verdict.value for verdict in Verdict), "worst", "in"))
    others = [finding for finding in found if finding.verdict is not Verdict.MET]
    columns = ("verdict", "bar", "cell", "arm", "value", "limit", "remark")
    listed = markdown([_line(finding) for finding in others], columns)
    return f"{table}\n\n{listed}" if others else table, any(each.verdict is Verdict.MISSED for each in others)


def choices(rows: Iterable[StepRow]) -> str:
    """A table of the choices in all cells: the plan, its step over those of plain DDP and of the best arm that is as
    accurate, and the error of its prediction."""
    lines = []
    for cell, arms, arm in _tuned(rows):
        row, best = arms[arm], best_of(arms, arm)
        step_s, predicted_s = float(row["median_s"]), row["predicted_s"]
        line = {"cell": " ".join(cell), "arm": arm, "chosen": row["chosen"], "step": f"{1e3 * step_s:.4g} ms"}
        line |= {"over plain": row["ratio_to_plain"], "best": best}
        line["over best"] = f"{_ratio(row)[0] / _ratio(arms[best])[0]:.3f}"
        line["predicted"] = f"{float(predicted_s) / step_s - 1:+.1%}" if predicted_s else ""
        lines.append(line)
    return markdown(lines, ("cell", "arm", "chosen", "step", "over plain", "over best", "best", "predicted"))


def _tuned(rows: Iterable[StepRow]) -> Iterator[tuple[Where, Mapping[str, StepRow], str]]:
    """Model, network and rate of every cell with its rows by arm, and each arm in it that has chosen its plan."""
    cells: dict[Where, dict[str, StepRow]] = {}
    for row in rows:
        if int(row["rounds"]):
            cells.setdefault((row["model"], row["network"], row["rate"]), {})[row["arm"]] = row
    for cell, arms in cells.items():
        yield from ((cell, arms, arm) for arm in TUNED if arm in arms)


def best_of(arms: Mapping[str, StepRow], arm: str) -> str:
    """The fastest of the other arms that are at least as accurate."""
    rivals = rivals_of(arm, {name: row["accuracy"] for name, row in arms.items()})
    return min(rivals, key=lambda name: _ratio(arms[name])[0])


def _in(cell: Where, arms: Mapping[str, StepRow], arm: str) -> list[Finding]:
    """The findings of one arm of a cell."""
    row, where = arms[arm], " ".join(cell)
    ratio, error = _ratio(row)
    noise = abs(_ratio(arms[AGAIN])[0] - 1) + _ratio(arms[AGAIN])[1] if AGAIN in arms else 1.0
    limit = 1 / (AS_FAST_QUIET if noise < QUIET else AS_FAST)
    found = [Finding("step over that of plain DDP", limit, where, arm, ratio, error, row["chosen"])]
    bar = f"step over the best of its accuracy, {accuracy_of(arm)}"
    found.append(_over(bar, OF_BEST, where, arm, arms, best_of(arms, arm)))
    if row["chosen"] == "nothing":
        found.append(Finding("step over plain DDP's where nothing pays", IDLE, where, arm, ratio, error, row["chosen"]))
    if cell[0] == LARGE and cell[2] in SLOW_RATES:
        for (name, other), speedup in SPEEDUPS.items():
            if name == arm and other in arms:
                found.append(_over(f"{arm}: step over that of {other}", 1 / speedup, where, arm, arms, other))
    for bar, column, seconds in (
        ("seconds of the call that attaches", "attach_s", ATTACH_S),
        ("seconds of the longest pause", "pause_s", PAUSE_S),
    ):
        if row[column]:
            found.append(Finding(bar, seconds, where, arm, float(row[column]), 0.0, ""))
    return found


def _over(bar: str, limit: float, where: str, arm: str, arms: Mapping[str, StepRow], other: str) -> Finding:
    """A finding on the step of an arm over that of another one, both by their ratios to plain DDP."""
    (mine, my_error), (theirs, their_error) = _ratio(arms[arm]), _ratio(arms[other])
    value = mine / theirs
    error = value * ((my_error / mine) ** 2 + (their_error / theirs) ** 2) ** 0.5
    return Finding(bar, limit, where, arm, value, error, f"against {other}; chosen {arms[arm]['chosen']}")


def _ratio(row: StepRow) -> tuple[float, float]:
    return float(row["ratio_to_plain"]), float(row["ratio_error"])


def _line(finding: Finding) -> dict[str, str]:
    value = f"{finding.value:.3f} ± {finding.error:.3f}"
    line = {"verdict": finding.verdict.value, "bar": finding.bar, "cell": finding.cell, "arm": finding.arm}
    return line | {"value": value, "limit": f"{finding.limit:.3f}", "remark": finding.remark}
