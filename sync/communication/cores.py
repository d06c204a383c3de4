"""The cores of a rank, and a clock that knows when a thread had to wait for one of them."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .collectives import exchange_text

_ACCOUNT = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds waiting for one, number of turns
_ROUNDING = 1e-6  # parts of cores are added up


class Moment(NamedTuple):
    """A moment, as a thread sees it."""

    at_s: float  # seconds of a monotonic clock
    waited_s: float
    """Seconds for which the thread has waited for a core up to now, although it could have run: other threads had the
    cores. It is 0 where the system does not tell."""
    thread: int

    @staticmethod
    def now() -> Moment:
        """This moment of the calling thread."""
        waited_s = _waited_s()
        while True:
            at_s, before_s = time.perf_counter(), waited_s
            waited_s = _waited_s()
            if waited_s == before_s:  # otherwise it waited between the two readings
                return Moment(at_s, waited_s, threading.get_ident())

    def elapsed_s(self, since: Moment) -> float:
        """The seconds since an earlier moment."""
        return self.at_s - since.at_s

    def waiting_s(self, since: Moment) -> float:
        """The seconds since an earlier moment of the same thread in which it waited for a core; 0 for another one."""
        return self.waited_s - since.waited_s if self.thread == since.thread else 0.0


class _Account:
    """The account that Linux keeps of the calling thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        try:
            self._descriptor = os.open(_ACCOUNT, os.O_RDONLY)
        except OSError:
            self._descriptor = -1

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def waited_s(self) -> float:
        if self._descriptor < 0:
            return 0.0
        try:
            return int(os.pread(self._descriptor, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


_of_thread = threading.local()


def _waited_s() -> float:
    account: _Account | None = getattr(_of_thread, "account", None)
    if account is None or account.process != os.getpid():  # after a fork it would be that of the parent's thread
        account = _of_thread.account = _Account()
    return account.waited_s()


def running_s() -> float:
    """Seconds of a clock of the calling thread that stands still while the thread waits for a core."""
    now = Moment.now()
    return now.at_s - now.waited_s


@dataclass(frozen=True)
class Cores:
    """The cores that the ranks have to compute with."""

    least: float
    """Cores of the rank that has least: its part of each core on which other ranks of its host may run, too."""
    threads: int  # the threads of torch in the rank that has most of them

    @property
    def suffice(self) -> bool:
        """Whether every thread has a core. If so, only other programs make one wait."""
        return self.least > self.threads - _ROUNDING

    @property
    def slowdown(self) -> float:
        """The factor by which all ranks compute slower when all of them do than one with cores of its own."""
        return 1.0 if self.suffice else self.threads / self.least

    @staticmethod
    def of(group: dist.ProcessGroup | None, device: torch.device) -> Cores:
        """The cores of some ranks. Collective.

        Args:
            group: all ranks; ``None`` for this process alone.
            device: a device whose tensors the group can send.
        """
        mine = {"host": platform.node(), "cores": f"{_own_bits():x}", "threads": torch.get_num_threads()}
        records: list[dict[str, Any]] = [mine]
        if group is not None:
            records = [json.loads(text) for text in exchange_text(group, device, json.dumps(mine))]
        hosts = [str(each["host"]) for each in records]
        found = [
            own_cores(int(each["cores"], 16), [int(other["cores"], 16) for other in records if other["host"] == host])
            for each, host in zip(records, hosts, strict=True)
        ]
        return Cores(min(found), max(int(each["threads"]) for each in records))


def own_cores(mine: int, of_host: Sequence[int]) -> float:
    """The number of cores of a rank: its part of each core on which other ranks of the host may run as well.

    Args:
        mine: the cores on which the rank may run, as bits.
        of_host: the same of every rank of its host.
    """
    return sum(1.0 / sum(each >> core & 1 for each in of_host) for core in range(mine.bit_length()) if mine >> core & 1)


def _own_bits() -> int:
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1  # a system that binds no process to cores
