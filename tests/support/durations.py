"""A plugin of pytest that writes where the time of a run has gone: ``build/durations.csv``."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "build" / "durations.csv"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the seconds and the items of every test, the slowest first. A run of a few tests writes nothing."""
    spent_s: dict[str, float] = defaultdict(float)
    items: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                test = report.nodeid.partition("[")[0]
                spent_s[test] += report.duration
                items[test].add(report.nodeid)
    if len(items) < 1000:
        return
    PATH.parent.mkdir(exist_ok=True)
    with PATH.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("test", "seconds", "items"))
        for name in sorted(spent_s, key=spent_s.__getitem__, reverse=True):
            writer.writerow((name, f"{spent_s[name]:.1f}", len(items[name])))
