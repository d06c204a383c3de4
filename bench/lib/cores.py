"""The cores of ranks: each keeps to its own, and the host of a virtual machine may give their time to others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

_COUNTERS = Path("/proc/stat")
_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def keep_to_own_cores() -> None:
    """Let this rank run on its part of the cores, which a machine of its own would have. With more ranks than cores,
    each rank keeps to one of them.

    Linux often lets two ranks that wait for each other run on one core for seconds, while another one is idle.
    """
    cores, rank, ranks = sorted(os.sched_getaffinity(0)), dist.get_rank(), dist.get_world_size()
    first, last = (len(cores) * each // ranks for each in (rank, rank + 1))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores[first : max(last, first + 1)])


class Stolen:
    """The part of the cores that a host gives to others from now on, without which a timing says little."""

    def __init__(self) -> None:
        self._begin_s, self._stolen_s = time.monotonic(), _stolen_s()

    def part(self) -> float:
        """The part of all cores since the beginning, from 0 to 1."""
        spent_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        return (_stolen_s() - self._stolen_s) / max(spent_s, 1e-9)


def _stolen_s() -> float:
    """The seconds of any core, since this computer started, that its host gave to others."""
    counters = _COUNTERS.read_text().splitlines()[0].split()[1:]
    ticks = dict(zip(_KINDS, map(int, counters), strict=False))
    return ticks.get("steal", 0) / os.sysconf("SC_CLK_TCK")
