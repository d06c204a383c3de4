"""Help for tests that need links between network namespaces; a plugin of pytest, for its fixture."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gckernels.sync.lab import missing

CHECKOUT = Path(__file__).parents[2]
WAIT_S = 60  # generous limit for events that take an instant unless they never happen


def need_links() -> None:
    """Skip the test where links cannot be created, and say why; the attempt leaves nothing behind."""
    if (why := _why_not()) is not None:
        pytest.skip(f"no network namespaces here: {why}")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working directory of ranks, from which they can import the package; skips where there are no links."""
    need_links()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def script(folder: Path, text: str) -> Path:
    """The path of a script with a text."""
    path = folder / "script.py"
    path.write_text(text)
    return path


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail after ``WAIT_S``."""
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@functools.cache
def _why_not() -> str | None:
    if (why := missing()) is not None:
        return why
    made = "ip link add bridge type bridge; tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-ec", made], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() or f"exit status {tried.returncode}" if tried.returncode else None
