"""A measurement in progress: its ranks, the time that is left, what it may measure, and what it had to leave out.

Its stopwatches have not been run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gckernels.devices import is_accelerator
from gckernels.sync.communication.clocks import StreamClock, WallClock
from gckernels.sync.communication.ranks import Ranks
from gckernels.sync.programs.topology import Topology
from gckernels.sync.resources.memory_spaces import Places

KI, MI = 1 << 10, 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class MeasurementExtent:
    """How much is measured."""

    least_nbytes: int = KI  # smallest size of a collective
    largest_nbytes: int = 64 * MI  # largest size of a collective
    longest_s: float = 0.15  # seconds of the longest call
    curve_s: float = 2.5
    """Seconds of a collective at most, which its sizes and two moments share; more while these disagree."""
    trains: int = 24  # the number of trains of each size that are measured at one moment at most
    rounds: int = 4  # the number of times that anything else is measured
    elements: tuple[int, ...] = tuple(4 * KI << shift for shift in range(0, 13, 2))
    """The numbers of elements of codecs with one unit."""
    many: tuple[tuple[int, int], ...] = (
        (16, 64 * KI),
        (16, MI),
        (128, 256 * KI),
        (128, 4 * MI),
    )
    """Pairs of units and elements."""
    far_caches: float = 4.0
    """Bytes that pass through the caches before a buffer is used again, relative to the largest cache."""

    @staticmethod
    def of(seconds: float) -> MeasurementExtent:
        """The extent for a number of seconds: less in everything below 30 of them."""
        if seconds >= 30:
            return MeasurementExtent()
        return MeasurementExtent(
            largest_nbytes=16 * MI,
            longest_s=0.06,
            curve_s=0.7,
            rounds=2,
            elements=tuple(4 * KI << shift for shift in range(0, 9, 2)),
            many=((16, 256 * KI), (128, MI)),
            far_caches=2.0,
        )


@dataclass
class Session:
    """A measurement in progress, which begins when the object is made."""

    ranks: Ranks  # all ranks
    seconds: float
    """The seconds that it may take. A part that begins before they are over is measured to its end, and so is one that
    every plan needs."""
    places: Places  # the memories of this rank
    topology: Topology  # topology of the ranks
    extent: MeasurementExtent  # how much is measured
    progress: Callable[[float, str], object]
    """Called with the share of the seconds that is spent, and the name of the part that begins."""
    clock: Callable[[], float] = time.perf_counter
    """The seconds of calls that only compute. It stands still while other threads have the cores, and is faster by the
    factor by which ranks slow down each other."""
    now: Callable[[], float] = time.monotonic  # returns the seconds of a clock that never stands still
    left_out: list[str] = field(default_factory=list)  # the parts for which there was no time, for people

    def __post_init__(self) -> None:
        self._start_s = self.now()

    @property
    def spent_s(self) -> float:
        """Seconds that this rank has spent."""
        return self.now() - self._start_s

    def left_s(self) -> float:
        """Seconds that are left on rank 0; 0 if all are spent. Collective."""
        return self.ranks.first(max(self.seconds - self.spent_s, 0.0))

    def part(self, name: str, measure: Callable[[], T], *, is_needed: bool = False) -> T | None:
        """The result of ``measure`` if there is time for it; otherwise ``None``, and a note of what was left out.
        Collective.

        Args:
            name: the name of the part, for people.
            is_needed: whether it is measured even if there is no time left.
        """
        if not is_needed and not self.left_s():
            self.left_out.append(f"{name}: no time")
            return None
        self.progress(min(self.spent_s / self.seconds, 1.0), name)
        return measure()


class Stopwatch:
    """Measures the time between marks, and the CPU time of the process.

    On an accelerator a mark is an event of the current stream, so what is measured is the work of the device.

    Args:
        device: the device that does the work.
        clock: the seconds of a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock: Any = StreamClock(device) if is_accelerator(device) else WallClock(clock)
        self._marks: list[Any] = []
        self._cpu_s = time.process_time()

    def mark(self) -> None:
        """Remember the current time."""
        self._marks.append(self._clock.mark())

    def seconds(self) -> list[float]:
        """Seconds from the first mark to every mark. On an accelerator, waits for the last one."""
        return [self._clock.seconds(self._marks[0], mark) for mark in self._marks]

    def cores_s(self) -> float:
        """CPU seconds of all threads of the process since this stopwatch was made."""
        return time.process_time() - self._cpu_s
