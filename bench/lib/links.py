"""Ranks in network namespaces, on links of a known rate: what a cluster is to them, on one machine.

    python -m bench.lib.links --ranks 2 --rate 1gbit -m examples.digits --compressor EFSignSGD

Every rank has a namespace with one interface, ``eth0``. A bridge in one more namespace joins them; both ends of every
link go through a token bucket of the given rate. Nothing is made outside these namespaces. Needs root, and ``ip`` and
``tc`` of Debian's package ``iproute2``.
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
RATE = "LINK_RATE"  # the variable that tells a rank the rate of its link
UNTHROTTLED = "none"
PREFIX = "gckernels"
NAMESPACES = Path("/run/netns")
QUEUE = "50ms"
BUCKET_S, BUCKET_NBYTES = 0.001, 4096  # with less, timers that are late cost throughput where the cores are busy
FIRST_PORT = 29500
POLL_S = 0.05

_counter = itertools.count()


class LinksError(RuntimeError):
    """Links cannot be made here; the message says what is missing."""


def missing() -> str | None:
    """What links need and is not here, as far as it shows before anything is done; ``None`` if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    # setpriv is a part of every Debian
    absent = [tool for tool in ("ip", "tc", "setpriv") if shutil.which(tool) is None]
    if absent:
        package = "util-linux" if absent == ["setpriv"] else PACKAGE
        return f"{' and '.join(absent)} not found; Debian has it in the package {package}: apt-get install {package}"
    if os.geteuid() != 0:
        return "network namespaces and rates of links need root"
    return None


class Links:
    """Namespaces for ranks, joined by a bridge; made by :func:`links`.

    Attributes:
        ranks: number of them.
        rate: of each link, as ``tc`` writes it: ``"100mbit"``; ``"none"`` if nothing slows it down.
        namespaces: their names, by rank.
    """

    def __init__(self, ranks: int, rate: str) -> None:
        self.ranks, self.rate = ranks, rate
        pid = os.getpid()
        own = f"{PREFIX}-{pid}-{_started(pid)}-{next(_counter)}"
        self.namespaces = [f"{own}-rank{rank}" for rank in range(ranks)]
        self._switch = f"{own}-switch"
        self._ports = itertools.count(FIRST_PORT)  # one that has just been used may not be free again yet

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
                # without IPv6 nothing is sent that no rank has sent
                _run("ip", "-n", where, "link", "set", end, "addrgenmode", "none")
                if self.rate != UNTHROTTLED:
                    bucket = ("rate", self.rate, "burst", str(bucket_nbytes(self.rate)), "latency", QUEUE)
                    _run("tc", "-n", where, "qdisc", "add", "dev", end, "root", "tbf", *bucket)
                _run("ip", "-n", where, "link", "set", end, "up")
            _run("ip", "-n", name, "address", "add", f"{_address(rank)}/16", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def run(self, *arguments: str | Path, timeout_s: float = math.inf, grace_s: float = 10) -> list[int]:
        """Run a Python program in every namespace, as a rank that ``init_process_group("gloo")`` understands, with one
        thread. Returns when all have ended, and leaves none running however it ends.

        Args:
            arguments: of the interpreter: a script's path, or ``-m`` and a module's name; and those of the program.
            timeout_s: what runs longer is killed.
            grace_s: time for the others when one rank has failed; they are killed then, for they may wait for it.

        Returns:
            The exit codes by rank, negative for signals.
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
                _kill(name)  # what ranks have started
        return [process.returncode for process in processes]

    def _start(self, rank: int, port: int, command: list[str]) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,  # unset, Gloo takes 127.0.0.1, where nobody else is
            "OMP_NUM_THREADS": "1",
            RATE: self.rate,
        }
        # a rank ends with this process, whatever that died of
        inside = ("ip", "netns", "exec", self.namespaces[rank], "setpriv", "--pdeathsig", "KILL", sys.executable)
        return subprocess.Popen([*inside, *command], env=environment, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def links(ranks: int, rate: str = UNTHROTTLED) -> Iterator[Links]:
    """Make links, and remove them at the end of the ``with`` block, also after an exception, SIGINT or SIGTERM. What a
    run left that was killed is removed first.

    Args:
        ranks: number of namespaces, 1 to 250.
        rate: of each link in both directions: ``"100mbit"``, ``"1gbit"``; ``"none"`` leaves them as fast as they are.

    Raises:
        ValueError: an argument is not valid.
        LinksError: they cannot be made here, and why.
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
    """``text`` if it is a rate of links.

    Raises:
        ValueError: it is not.
    """
    if text != UNTHROTTLED and re.fullmatch(r"[1-9][0-9]*[kmg]bit", text) is None:
        raise ValueError(f"a rate is written as 100mbit or 1gbit, or is {UNTHROTTLED}; got {text!r}")
    return text


def bucket_nbytes(rate: str) -> int:
    """What passes at once after a pause, on a link of this rate."""
    bits_per_s = int(rate[:-4]) * {"k": 10**3, "m": 10**6, "g": 10**9}[rate[-4]]
    return BUCKET_NBYTES + int(bits_per_s / 8 * BUCKET_S)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, and end what still runs in them."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}-*")):
        found = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", path.name)
        # a number alone may be another process by now
        if found is not None and _started(int(found[1])) != int(found[2]):
            _remove(path.name)


def in_rank() -> bool:
    """Whether this process was started by :meth:`Links.run`."""
    return RATE in os.environ


def sent_nbytes() -> int:
    """What has gone out of this namespace so far, as the kernel counts it: with the headers of Ethernet, IP and TCP, of
    each packet or once for what TCP hands over at once, up to 64 KiB."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise LinksError(f"there is no interface {INTERFACE} here")


# -------------------------------------------------------------------- processes and namespaces


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _run(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LinksError(f"{' '.join(command)}: {ran.stderr.strip() or f'exit status {ran.returncode}'}")
    return ran.stdout


def _remove(name: str) -> None:
    """A namespace and what runs in it; interfaces go with their namespace."""
    if (NAMESPACES / name).exists():
        _kill(name)
        with contextlib.suppress(LinksError):  # another process has been faster, or it was only half made
            _run("ip", "netns", "delete", name)


def _kill(name: str) -> None:
    with contextlib.suppress(LinksError):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _started(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is an exception, as SIGINT is; elsewhere than in the main thread nothing can be said about signals."""
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
    """Run a program's ranks on links of one rate after the other, up to the first failure; print what failed.

    Returns:
        The exit status of a command that does nothing else: 0, 1 where a rank has failed, 2 where there are no links.
    """
    try:
        for rate in rates:
            with links(ranks, rate) as made:
                codes = made.run(*arguments)
            for rank, code in enumerate(codes):
                if code:
                    how = f"signal {-code}" if code < 0 else f"exit status {code}"
                    print(f"rank {rank} of {ranks}, {rate}, ended with {how}", file=sys.stderr)
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
    parser.add_argument("--rate", default="1gbit", help=f"of each link; {UNTHROTTLED}: as fast as it is")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="run by every rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    return run_in_links(args.ranks, [args.rate], [*(["-m"] if args.module else []), args.script, *args.arguments])


if __name__ == "__main__":
    sys.exit(main())
