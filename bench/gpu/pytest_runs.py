"""Runs of pytest within a time budget, with a JUnit file and a short summary of failures grouped by message."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.program import ROOT, heed_interrupts

END_S = 15.0  # time for an interrupted run to write its JUnit file
MAX_FAILURES = 200
MAX_SHOWN, MAX_SHOWN_SLOW = 15, 5
MESSAGE_CHARS = 160


@dataclass(frozen=True)
class Case:
    """A test that has run.

    Attributes:
        name: path and name of the test, joined by ``::``.
        seconds: time that it took.
        outcome: ``"passed"``, ``"failed"``, ``"error"`` or ``"skipped"``.
        message: first line of a failure's or error's message, otherwise empty.
    """

    name: str
    seconds: float
    outcome: str
    message: str


def run(
    name: str,
    arguments: Sequence[str],
    budget: Budget,
    test_s: float = 120.0,
    workers: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Run pytest on the tests for a GPU, and interrupt it when the budget ends.

    Args:
        name: name of the JUnit file, ``<name>.xml`` in the results folder.
        arguments: files and options for pytest that choose the tests.
        budget: time for the whole run; an interrupted run is noted in ``left_out``.
        test_s: seconds that one test may take.
        workers: processes that share the tests; 0 runs them in pytest's own process.
        environment: environment variables in addition to those of this process.

    Returns:
        The summary; ``ok`` if no test has failed.
    """
    from bench.lib.record import results_folder

    path = results_folder("cuda") / f"{name}.xml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    allowed_s = max(1.0, min(test_s, budget.left_s - END_S))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--quiet", "--tb=line", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors"]
    command += [f"--timeout={allowed_s:.0f}", f"--maxfail={MAX_FAILURES}", f"--junitxml={path}", *arguments]
    if workers:
        command += ["-p", "bench.gpu.restart", f"--numprocesses={workers}", "--dist=worksteal"]
        command += ["--max-worker-restart=100"]
    variables = os.environ | {"PYTHONPATH": _with_root()} | dict(environment or {})
    process = subprocess.Popen(command, cwd=ROOT, env=variables, preexec_fn=heed_interrupts)
    interrupted = False
    try:
        process.wait(max(1.0, budget.left_s - END_S))
    except subprocess.TimeoutExpired:
        interrupted = True
        budget.left_out.append("the rest of the tests")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S - 1)
    finally:
        process.kill()
        process.wait()
    if not path.exists():
        return Result(False, [f"pytest ended with {process.returncode} and wrote no {path.name}"])
    cases = read(path)
    summary = summarize(cases)
    return Result(summary.ok and (bool(cases) or interrupted), summary.lines)


def _with_root() -> str:
    """``PYTHONPATH`` with the root of the checkout: plugins are imported before pytest adds the root."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def num_workers() -> int:
    """Number of test processes: all cores but two, at most 14, because each holds its own memory on the GPU."""
    return max(1, min(14, (os.cpu_count() or 1) - 2))


def read(path: Path) -> list[Case]:
    """The tests of a JUnit file."""
    cases = []
    for element in ElementTree.parse(path).getroot().iter("testcase"):
        if "name" not in element.attrib:  # an interrupted test
            continue
        outcome, message = "passed", ""
        for kind, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            child = element.find(kind)
            if child is not None:
                outcome, message = word, (child.get("message") or "").strip().partition("\n")[0]
        name = f"{element.get('classname', '').removeprefix('tests.').replace('.', '/')}::{element.get('name')}"
        cases.append(Case(name, float(element.get("time") or 0.0), outcome, message))
    return cases


def summarize(cases: Sequence[Case]) -> Result:
    """Counts of outcomes, then failures grouped by message with the most frequent first, then the slowest tests."""
    counts = Counter(case.outcome for case in cases)
    words = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "error", "skipped") if counts[outcome]]
    lines = [f"{', '.join(words) or 'no test has run'}; {sum(case.seconds for case in cases):.0f} s of tests"]
    alike: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if case.outcome in ("failed", "error"):
            alike[re.sub(r"0x[0-9a-f]+|\d+", "#", case.message)[:MESSAGE_CHARS]].append(case.name)
    for message, names in sorted(alike.items(), key=lambda item: -len(item[1]))[:MAX_SHOWN]:
        lines += [f"{len(names):>5} x {message}", f"        {names[0]}"]
    if len(alike) > MAX_SHOWN:
        lines.append(f"and {len(alike) - MAX_SHOWN} other messages")
    slowest = sorted(cases, key=lambda case: -case.seconds)[:MAX_SHOWN_SLOW]
    lines += [f"{case.seconds:>6.1f} s {case.name}" for case in slowest]
    return Result(not alike, lines)
