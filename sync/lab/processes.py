"""Processes of ranks, which end together and leave nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import namespaces

POLL_S = 0.05


def run_all(
    places: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    arguments: Sequence[str | Path],
    timeout_s: float,
    grace_s: float,
) -> list[int]:
    """Run a Python program once in every namespace, and wait until all have ended; no process is left running.

    Args:
        places: names of namespaces.
        environments: environment variables of each process, besides those of this one.
        arguments: arguments of the interpreter.
        timeout_s: processes that run longer are killed.
        grace_s: seconds until the others are killed when one has failed.

    Returns:
        Exit codes, negative for signals.
    """
    processes: list[subprocess.Popen[bytes]] = []
    end_s = time.monotonic() + timeout_s
    try:
        for place, environment in zip(places, environments, strict=True):
            processes.append(_start(place, environment, arguments))
        failed = False
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < end_s:
            if any(codes) and not failed:
                failed, end_s = True, min(end_s, time.monotonic() + grace_s)
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for place in places:
            namespaces.kill_processes(place)  # processes that the ranks have started
    return [process.returncode for process in processes]


def _start(place: str, environment: Mapping[str, str], arguments: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    # a rank ends with this process, even if this process is killed
    inside = ("ip", "netns", "exec", place, "setpriv", "--pdeathsig", "KILL", sys.executable)
    return subprocess.Popen(
        [*inside, *map(str, arguments)], env={**os.environ, **environment}, stdin=subprocess.DEVNULL
    )
