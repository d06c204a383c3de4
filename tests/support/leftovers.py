"""What a closed attachment may have left in its process."""

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
    """The names of the lanes' threads that do not end within so many seconds. After a failure closing leaves those to
    themselves that are in a collective, and they end when that does."""
    deadline = time.monotonic() + within_s
    while found := sorted(each.name for each in threading.enumerate() if each.name.startswith("gckernels-")):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Fails if anything is written to standard error inside, be it by torch or by a finalizer that raises."""
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
    """The numbers of processes that this one has started and that have not ended."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}
