"""Network namespaces: whether this machine can have them, their names, and their removal."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"
PREFIX = "gckernels"
NAMESPACES = Path("/run/netns")
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}  # every Debian has setpriv

_counter = itertools.count()


class LinksError(RuntimeError):
    """Links cannot be created; the message says why."""


def missing() -> str | None:
    """Why links cannot be created on this machine, as far as can be known before trying; ``None`` if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    absent = [tool for tool in PACKAGES if shutil.which(tool) is None]
    if absent:
        packages = " ".join(dict.fromkeys(PACKAGES[tool] for tool in absent))
        return f"{' and '.join(absent)} not found: install {packages} (on Debian: apt-get install {packages})"
    if os.geteuid() != 0:
        return "network namespaces and rates of links need root"
    return None


def own_prefix() -> str:
    """The beginning of the names of a network's namespaces; it names this process, and no other network has it."""
    pid = os.getpid()
    return f"{PREFIX}-{pid}-{_started(pid)}-{next(_counter)}"


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, and kill the processes left in them."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}-*")):
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", path.name)
        # the process id alone may belong to another process by now
        if match is not None and _started(int(match[1])) != int(match[2]):
            remove(path.name)


def remove(name: str) -> None:
    """Kill the processes of a namespace and delete it; its interfaces are deleted with it."""
    if (NAMESPACES / name).exists():
        kill_processes(name)
        with contextlib.suppress(LinksError):  # another process has deleted it, or it was never complete
            run_tool("ip", "netns", "delete", name)


def kill_processes(name: str) -> None:
    """Kill the processes of a namespace."""
    with contextlib.suppress(LinksError):
        for pid in run_tool("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def run_tool(*command: str) -> str:
    """Run a command; returns what it prints.

    Raises:
        LinksError: the command failed.
    """
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LinksError(f"{' '.join(command)}: {ran.stderr.strip() or f'exit status {ran.returncode}'}")
    return ran.stdout


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, like SIGINT; does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])
