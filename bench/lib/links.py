"""Ranks in network namespaces, joined by links of a known rate: a cluster's network on one machine.

    python -m bench.lib.links --ranks 2 --rate 1gbit -m examples.digits --compressor EFSignSGD

Every rank has a namespace with one interface, ``eth0``. A bridge in a further namespace joins the ranks. A token bucket
throttles both ends of every link to the rate. Nothing outside these namespaces is changed. Needs root, and ``ip`` and
``tc`` from Debian's package ``iproute2``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PACKAGE = "iproute2"
INTERFACE = "eth0"
RATE = "LINK_RATE"  # environment variable with the rate of a rank's link
UNTHROTTLED = "none"
PREFIX = "gckernels"
NAMESPACES = Path("/run/netns")
QUEUE = "50ms"
BUCKET_S, BUCKET_NBYTES = 0.001, 4096  # with smaller buckets, late timers cost throughput on busy cores
FIRST_PORT = 29500
POLL_S = 0.05

_counter = itertools.count()


class LinksError(RuntimeError):
    """Links cannot be created; the message says why."""


def missing() -> str | None:
    """Why links cannot be created on this machine, as far as can be known before trying; ``None`` if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    # every Debian has setpriv
    absent = [tool for tool in ("ip", "tc", "setpriv") if shutil.which(tool) is None]
    if absent:
        package = "util-linux" if absent == ["setpriv"] else PACKAGE
        return f"{' and '.join(absent)} not found; Debian has it in the package {package}: apt-get install {package}"
    if os.geteuid() != 0:
        return "network namespaces and rates of links need root"
    return None


class Links:
    """Namespaces of ranks, joined by a bridge; created by :func:`links`.

    Attributes:
        ranks: number of ranks.
        rate: rate of each link in the notation of ``tc``, such as ``"100mbit"``; ``"none"`` if links are not throttled.
        namespaces: names of the namespaces, by rank.
    """

    def __init__(self, ranks: int, rate: str) -> None:
        self.ranks, self.rate = ranks, rate
        pid = os.getpid()
        own = f"{PREFIX}-{pid}-{_started(pid)}-{next(_counter)}"
        self.namespaces = [f"{own}-rank{rank}" for rank in range(ranks)]
        self._switch = f"{own}-switch"
        self._ports = itertools.count(FIRST_PORT)  # a port that has just been used may still be taken

    def _make(self) -> None:
        switch = self._switch
        for name in (switch, *self.namespaces):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.namespaces):
            port = f"port{rank}"
            ends = ((name, INTERFACE), (switch, port))
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            for where, end in ends:
                # no IPv6: it would send packets of its own
                _run("ip", "-n", where, "link", "set", end, "addrgenmode", "none")
                if self.rate != UNTHROTTLED:
                    bucket = ("rate", self.rate, "burst", str(bucket_nbytes(self.rate)), "latency", QUEUE)
                    _run("tc", "-n", where, "qdisc", "add", "dev", end, "root", "tbf", *bucket)
                _run("ip", "-n", where, "link", "set", end, "up")
            _run("ip", "-n", name, "address", "add", f"{_address(rank)}/16", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def run(self, *arguments: str | Path, timeout_s: float = math.inf, grace_s: float = 10) -> list[int]:
        """Run a Python program with one thread in every namespace, and wait until all ranks have ended.

        The environment variables of the ranks are those that ``init_process_group("gloo")`` reads. No process is left
        running, however this method ends.

        Args:
            arguments: a script's path, or ``-m`` and a module's name, followed by the program's arguments.
            timeout_s: ranks that run longer are killed.
            grace_s: seconds until the other ranks are killed when one has failed; they may be waiting for it.

        Returns:
            Exit codes by rank, negative for signals.
        """
        processes: list[subprocess.Popen[bytes]] = []
        port, end_s = next(self._ports), time.monotonic() + timeout_s
        try:
            for rank in range(self.ranks):
                processes.append(self._start(rank, port, list(map(str, arguments))))
            failed = False
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < end_s:
                if any(codes) and not failed:
                    failed, end_s = True, min(end_s, time.monotonic() + grace_s)
                time.sleep(POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for name in self.namespaces:
                _kill(name)  # processes that the ranks have started
        return [process.returncode for process in processes]

    def _start(self, rank: int, port: int, command: list[str]) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,  # without it Gloo listens on 127.0.0.1, which no other rank reaches
            "OMP_NUM_THREADS": "1",
            RATE: self.rate,
        }
        # a rank ends with this process, even if this process is killed
        inside = ("ip", "netns", "exec", self.namespaces[rank], "setpriv", "--pdeathsig", "KILL", sys.executable)
        return subprocess.Popen([*inside, *command], env=environment, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def links(ranks: int, rate: str = UNTHROTTLED) -> Iterator[Links]:
    """Create links, and remove them at the end of the ``with`` block, also after an exception, SIGINT or SIGTERM.

    Leftovers of killed runs are removed first.

    Args:
        ranks: number of namespaces, 1 to 250.
        rate: rate of each link in both directions, such as ``"100mbit"`` or ``"1gbit"``; ``"none"`` does not throttle.

    Raises:
        ValueError: an argument is not valid.
        LinksError: links cannot be created on this machine.
    """
    if not 1 <= ranks <= 250:
        raise ValueError(f"links: ranks must be from 1 to 250, got {ranks}")
    checked_rate(rate)
    if (why := missing()) is not None:
        raise LinksError(why)
    remove_leftovers()
    made = Links(ranks, rate)
    with _terminable():
        try:
            made._make()
            yield made
        finally:
            for name in (*made.namespaces, made._switch):
                _remove(name)


def checked_rate(text: str) -> str:
    """Return ``text`` unchanged if it is a valid rate of links.

    Raises:
        ValueError: ``text`` is not a rate.
    """
    if text != UNTHROTTLED and re.fullmatch(r"[1-9][0-9]*[kmg]bit", text) is None:
        raise ValueError(f"rate must be written like 100mbit or 1gbit, or be {UNTHROTTLED}; got {text!r}")
    return text


def bucket_nbytes(rate: str) -> int:
    """Size of the token bucket: bytes that pass without delay after a pause, on a link of this rate."""
    bits_per_s = int(rate[:-4]) * {"k": 10**3, "m": 10**6, "g": 10**9}[rate[-4]]
    return BUCKET_NBYTES + int(bits_per_s / 8 * BUCKET_S)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, and kill the processes left in them."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}-*")):
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", path.name)
        # the process id alone may belong to another process by now
        if match is not None and _started(int(match[1])) != int(match[2]):
            _remove(path.name)


def in_rank() -> bool:
    """Whether this process was started by :meth:`Links.run`."""
    return RATE in os.environ


def sent_nbytes() -> int:
    """Bytes sent from this namespace so far, as the kernel counts them.

    They include the headers of Ethernet, IP and TCP, counted per packet or, with segmentation offload, once for up to
    64 KiB.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise LinksError(f"this namespace has no interface {INTERFACE}")


# -------------------------------------------------------------------- processes and namespaces


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _run(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LinksError(f"{' '.join(command)}: {ran.stderr.strip() or f'exit status {ran.returncode}'}")
    return ran.stdout


def _remove(name: str) -> None:
    """Kill the processes of a namespace and delete it; its interfaces are deleted with it."""
    if (NAMESPACES / name).exists():
        _kill(name)
        with contextlib.suppress(LinksError):  # another process has deleted it, or it was never complete
            _run("ip", "netns", "delete", name)


def _kill(name: str) -> None:
    with contextlib.suppress(LinksError):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
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


# -------------------------------------------------------------------- commands


def run_in_links(ranks: int, rates: Iterable[str], arguments: Sequence[str]) -> int:
    """Run a program's ranks on links, one rate after another, up to the first failure; print which ranks failed.

    Args:
        ranks: number of ranks.
        rates: rates as in :func:`links`.
        arguments: arguments of the interpreter, as in :meth:`Links.run`.

    Returns:
        An exit status: 0 for success, 1 if a rank has failed, 2 if links cannot be created.
    """
    try:
        for rate in rates:
            with links(ranks, rate) as made:
                codes = made.run(*arguments)
            for rank, code in enumerate(codes):
                if code:
                    how = f"signal {-code}" if code < 0 else f"exit status {code}"
                    print(f"rank {rank} of {ranks} ended with {how} on links of rate {rate}", file=sys.stderr)
            if any(codes):
                return 1
    except (LinksError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help=f"rate of each link; {UNTHROTTLED} does not throttle")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="program that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args()
    return run_in_links(args.ranks, [args.rate], [*(["-m"] if args.module else []), args.script, *args.arguments])


if __name__ == "__main__":
    sys.exit(main())
