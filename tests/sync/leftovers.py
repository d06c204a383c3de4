"""What a closed attachment may have left in its process."""

from __future__ import annotations

import threading
import time
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


def children() -> set[str]:
    """The numbers of processes that this one has started and that have not ended."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}
