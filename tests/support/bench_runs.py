"""Results folder, tools, signals and rows of tested benchmarks; a plugin of pytest, for its fixtures."""

from __future__ import annotations

import csv
import gc
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def little_garbage():
    """Exempt what exists from garbage collection: measurements collect before every round, and a process that has run
    many tests has many objects to go over."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def out(little_garbage, monkeypatch, tmp_path):
    """The results folder."""
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """A function that puts a shell script on the path."""

    def make(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return make


@pytest.fixture
def path_of(tmp_path):
    """A function that writes rows into a file of results and returns its path."""

    def write(rows: Sequence[Mapping[str, object]]) -> Path:
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path / "rows.csv"

    return write


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def in_background():
    """Ignore SIGINT, as a program does that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)
