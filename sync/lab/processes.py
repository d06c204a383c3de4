"""Processes of ranks, which end together and leave nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import namespaces

POLL_S = 0.05


def run_all(
    places: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    arguments: Sequence[str | Path],
    timeout_s: float,
    grace_s: float,
    meanwhile: Callable[[float], None],
) -> list[int]:
    """Run a Python program once in every namespace, and wait until all have ended; no process is left running.

    Args:
        places: names of namespaces.
        environments: environment variables of each process, besides those of this one.
        arguments: arguments of the interpreter.
        timeout_s: processes that run longer are killed.
        grace_s: seconds until the others are killed when one has failed.
        meanwhile: called again and again, with the seconds since the start.

    Returns:
        Exit codes, negative for signals.
    """
    processes: list[subprocess.Popen[str]] = []
    start_s = time.monotonic()
    end_s = start_s + timeout_s
    try:
        for place, environment in zip(places, environments, strict=True):
            processes.append(start(place, environment, arguments))
        failed = False
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < end_s:
            if any(codes) and not failed:
                failed, end_s = True, min(end_s, time.monotonic() + grace_s)
            meanwhile(time.monotonic() - start_s)
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for place in places:
            namespaces.kill_processes(place)  # processes that the ranks have started
    return [process.returncode for process in processes]


def start(
    place: str, environment: Mapping[str, str], arguments: Sequence[str | Path], stdout: int | None = None
) -> subprocess.Popen[str]:
    """Start a Python program in a namespace; it ends with this process, even if this process is killed.

    Args:
        place: name of the namespace.
        environment: environment variables, besides those of this process.
        arguments: arguments of the interpreter.
        stdout: where the output goes, as for :class:`subprocess.Popen`.
    """
    ip, setpriv = (namespaces.found_tool(tool) or tool for tool in ("ip", "setpriv"))
    inside = (ip, "netns", "exec", place, setpriv, "--pdeathsig", "KILL", sys.executable)
    command, variables = [*inside, *map(str, arguments)], {**os.environ, **environment}
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, text=True)
