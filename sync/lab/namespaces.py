"""Network namespaces: whether this machine can have them, without root inside a user namespace, and their removal."""

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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

INTERFACE = "eth0"
PREFIX = "gckernels"
NAMESPACES = Path("/run/netns")
SYSTEM_FOLDERS = "/usr/sbin:/sbin"
"""Folders of tools for administrators, which PATH may lack: that of users on Debian, and that of root after ``su``."""
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}
_PACKAGES = PACKAGES | {"unshare": "util-linux", "mount": "mount"}  # every Debian has these and setpriv

_ENTER = ("--user", "--map-root-user", "--net", "--mount")
_MOUNT = "mount -t tmpfs tmpfs /run && mkdir /run/netns"  # the folder of named namespaces belongs to root otherwise
_TRY = "ip link add bridge type bridge && tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms"

_counter = itertools.count()


class LinksError(RuntimeError):
    """Links cannot be created; the message says why."""


def missing() -> str | None:
    """Why links cannot be created on this machine, as far as can be known before trying; ``None`` if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces and rates of links need root"
    return lacking(PACKAGES)


def lacking(tools: Iterable[str]) -> str | None:
    """The tools that are not found, and what to install; ``None`` if all are there."""
    absent = [tool for tool in tools if found_tool(tool) is None]
    if not absent:
        return None
    packages = " ".join(dict.fromkeys(_PACKAGES[tool] for tool in absent))
    return f"{' and '.join(absent)} not found: install {packages} (on Debian: apt-get install {packages})"


def found_tool(name: str) -> str | None:
    """The path of a tool, in the folders of PATH or in those of administrators; ``None`` if it is in none of them."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), SYSTEM_FOLDERS]))


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


def run_tool(tool: str, *arguments: str) -> str:
    """Run a tool; returns what it prints.

    Raises:
        LinksError: it failed.
    """
    ran = subprocess.run([found_tool(tool) or tool, *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LinksError(f"{' '.join([tool, *arguments])}: {ran.stderr.strip() or f'exit status {ran.returncode}'}")
    return ran.stdout


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP into an exception, like SIGINT, and ignore further ones.

    A signal that is ignored already, as ``nohup`` ignores SIGHUP, stays so, and so does one whose handler is not
    Python's. Does nothing outside the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)]

    def leave(number: int, _frame: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)  # nothing interrupts the removal
        raise SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, handlers[number])


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


# -------------------------------------------------------------------- without root


def enter_own_namespaces(program: Sequence[str]) -> str | None:
    """Run a program in place of this one, in namespaces of its own where it has the rights of root over links, and with
    the rights of this user over everything else.

    Args:
        program: arguments of the interpreter.

    Returns:
        Why that is not possible; ``None`` if it is not needed, because root or such a program has called. Otherwise the
        function does not return.
    """
    if os.geteuid() == 0 or not sys.platform.startswith("linux"):
        return None
    if (why := lacking((*PACKAGES, "unshare", "mount"))) is not None:
        return why
    unshare = found_tool("unshare") or "unshare"
    tried = subprocess.run(
        [unshare, *_ENTER, "sh", "-ec", f"{_MOUNT}; {_TRY}"], capture_output=True, text=True, check=False, env=_paths()
    )
    if tried.returncode:
        lines = tried.stderr.strip().splitlines()
        return f"this system lets only root make links ({lines[-1] if lines else f'exit status {tried.returncode}'})"
    sys.stdout.flush()
    sys.stderr.flush()
    run = ["sh", "-ec", f'{_MOUNT}; exec "$@"', "sh", sys.executable, *program]
    os.execve(unshare, [unshare, *_ENTER, *run], _paths())


def _paths() -> dict[str, str]:
    """The environment, with a PATH that has the folders of administrators."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}"}
