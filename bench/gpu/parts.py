"""Targets made of parts that run one after the other, each in a separate process and within a time budget.

A kernel that hangs, or breaks its process's connection to the GPU, affects only its own part. The output of all parts
goes to one log. The terminal shows each part's findings as soon as the part ends, and a table at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.lib.budget import Budget
from bench.lib.program import heed_interrupts, python_arguments

SUMMARY = "=== summary"  # the terminal repeats everything that a part prints after this line
GRACE_S = 8.0  # a part is interrupted this long after its limit, and killed after the same time again
LOG_LINES = 8  # repeated on the terminal when a part ended without a summary


@dataclass(frozen=True)
class Result:
    """The findings of a part.

    Attributes:
        ok: whether the part found nothing wrong.
        lines: the findings; the table shows only the first line.
    """

    ok: bool
    lines: list[str]


@dataclass(frozen=True)
class Part:
    """A piece of a target.

    Attributes:
        name: on the command line and in the table.
        work: called in the part's process with the part's budget; returns before the budget is used up.
        max_s: seconds that the part may take.
        min_s: the part is not started with fewer seconds left.
        environment: environment variables of the part's process, in addition to the caller's.
        on_request: run only if named on the command line.
    """

    name: str
    work: Callable[[Budget], Result]
    max_s: float
    min_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    on_request: bool = False


def main(name: str, parts: Sequence[Part], budget_s: float, arguments: Sequence[str] | None = None) -> int:
    """Run a target's command line; returns the exit code, 1 if a part failed.

    Args:
        name: name of the target, of its log, and of its summary in the results folder.
        parts: the parts, in the order in which they run.
        budget_s: seconds that all parts may take together.
        arguments: names of parts, by default all; or ``--only`` and one name, which runs in this process.
    """
    parser = argparse.ArgumentParser(prog=name)
    names = [part.name for part in parts]
    usual = [part.name for part in parts if not part.on_request]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"by default {' '.join(usual)}")
    parser.add_argument("--only", choices=names, help="run one part in this process, without a log")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(names):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; the parts are {', '.join(names)}")
    if options.only:
        return run_here(next(part for part in parts if part.name == options.only))
    return run_apart(name, [part for part in parts if part.name in (options.parts or usual)], budget_s)


def run_here(part: Part) -> int:
    """Run one part in this process and print its findings."""
    budget = Budget.of_this_process()
    result = part.work(budget)
    print(SUMMARY, *result.lines, sep="\n")
    if budget.left_out:
        print(f"left out for lack of time: {', '.join(budget.left_out)}")
    sys.stdout.flush()
    return 0 if result.ok else 1


def run_apart(name: str, parts: Sequence[Part], budget_s: float) -> int:
    """Run parts in separate processes; prints a table of them last and writes it to ``<name>.txt``."""
    from bench.lib.record import results_folder  # imports torch, which the processes of small parts do not need

    folder = results_folder("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    budget, log = Budget(budget_s), folder / f"{name}.log"
    log.write_bytes(b"")
    table: list[tuple[str, str, float, str]] = []
    for part in parts:
        started = time.monotonic()
        if budget.allows(part.name, part.min_s + 2 * GRACE_S):
            limit_s = min(part.max_s, budget.left_s - 2 * GRACE_S)
            print(f"== {part.name}: at most {limit_s:.0f} s", flush=True)
            outcome, lines = _run(part, limit_s, log)
            print(*lines, "", sep="\n", flush=True)
        else:
            outcome, lines = "left out", [f"{budget.left_s:.0f} s were left"]
        table.append((part.name, outcome, time.monotonic() - started, lines[0] if lines else ""))
        text = "\n".join(f"{part:<14}{outcome:<12}{seconds:>5.0f} s  {line}" for part, outcome, seconds, line in table)
        (folder / f"{name}.txt").write_text(text + "\n")
    print(f"== {name}: {budget_s - budget.left_s:.0f} s of {budget_s:.0f}", text, sep="\n", flush=True)
    return 0 if all(outcome in ("ok", "left out") for _, outcome, _, _ in table) else 1


def _run(part: Part, limit_s: float, log: Path) -> tuple[str, list[str]]:
    """Run a part; returns how it ended, and its findings or, without a summary, the last lines that it printed."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(part.environment) | Budget(limit_s).environment()
    with log.open("ab") as output:
        begin = output.tell()
        command = [sys.executable, *python_arguments(sys.argv[0]), "--only", part.name]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        outcome = _wait(process, limit_s)
    with log.open("rb") as written:
        written.seek(begin)
        text = written.read().decode(errors="replace")
    _, separator, summary = text.rpartition(f"{SUMMARY}\n")
    if separator:
        return outcome, summary.splitlines()
    last = text.splitlines()[-LOG_LINES:]
    return outcome, [*last[-1:], *last[:-1]]  # the last line of a traceback names the error


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a process, interrupt and then kill it past the limit, and kill its children; returns how it ended."""
    try:
        for patience_s, late in ((limit_s + GRACE_S, ""), (GRACE_S, "too long")):
            try:
                code = process.wait(patience_s)
                return late or ("ok" if code == 0 else "failed" if code == 1 else f"failed ({code})")
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
        return "too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
