"""Detection of threads, output and processes that a closed attachment has left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def lanes(within_s: float = 0.0) -> list[str]:
    """Names of the lanes' threads that do not end within ``within_s`` seconds.

    After a failure, closing does not wait for threads that are in a collective; they end when the collective does.
    """
    deadline = time.monotonic() + within_s
    while names := sorted(each.name for each in threading.enumerate() if each.name.startswith("gckernels-")):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return names


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Fails if anything, even torch or a finalizer, writes to standard error inside the ``with`` block."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        assert file.read().decode() == ""


def children() -> set[str]:
    """Ids of this process's child processes that have not ended."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def group_threads() -> int:
    """The number of threads of process groups of Gloo in this process, when all new threads have got their names."""
    while True:
        names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
        if names.count(Path("/proc/self/comm").read_text().strip()) <= threading.active_count():
            return names.count("pt_gloo_runloop")
        time.sleep(0.01)
