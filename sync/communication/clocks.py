"""Clocks that mark moments of a training, and later say how many seconds are between two marks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class WallClock:
    """The clock of a training on the CPU. A mark takes a tenth of the time of one that knows how long threads wait.

    Args:
        now: returns seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """The clock of a training on a GPU: marks are events in its current stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """The seconds between two marks. The host waits until both are reached."""
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) * 1e-3

    def waiting_s(self, first: Any, second: Any) -> float:
        """The seconds in which the thread waited for a core between two marks, of which a GPU knows none."""
        return 0.0


def clock_of(device: torch.device) -> Any:
    """The clock of a training on a device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
