"""The part of the cores that the host of a virtual machine gives to others, without which a timing says little."""

from __future__ import annotations

import os
import time
from pathlib import Path

_COUNTERS = Path("/proc/stat")
_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class Stolen:
    """The part of the cores that a host gives to others from now on."""

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
