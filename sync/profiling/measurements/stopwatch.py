"""Stopwatches: seconds between marks, on the CPU or on a CUDA stream.

Nothing here has been run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Measures the time between marks, and the CPU time of the process.

    On CUDA a mark is an event of the current stream, so what is measured is the work of the device.

    Args:
        device: the device that does the work.
        clock: the seconds of a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._on_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._marks: list[float] = []
        self._cpu_s = time.process_time()

    def mark(self) -> None:
        """Remember the current time."""
        if self._on_cuda:
            event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._marks.append(self._clock())

    def seconds(self) -> list[float]:
        """Seconds from the first mark to every mark. On CUDA, waits for the last one."""
        if self._on_cuda:
            self._events[-1].synchronize()
            return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        return [mark - self._marks[0] for mark in self._marks]

    def cores_s(self) -> float:
        """CPU seconds of all threads of the process since this stopwatch was made."""
        return time.process_time() - self._cpu_s
