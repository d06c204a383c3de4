"""Clocks that mark moments of a training, and later say how many seconds are between two marks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gckernels.devices import current_stream, event_behind, is_accelerator


class WallClock:
    """The clock of a training on the CPU. A mark takes a tenth of the time of one that knows how long threads wait.

    Args:
        now: returns seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def seconds(self, first: float, second: float) -> float:
        return second - first


class StreamClock:
    """The clock of a training on an accelerator: marks are events in the current stream.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        return event_behind(current_stream(self._device), is_timed=True)

    def seconds(self, first: Any, second: Any) -> float:
        """The seconds between two marks. The host waits until both are reached."""
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) * 1e-3

    def waiting_s(self, first: Any, second: Any) -> float:
        """The seconds in which the thread waited for a core between two marks, of which an accelerator knows none."""
        return 0.0


def clock_of(device: torch.device) -> Any:
    """The clock of a training on a device."""
    return StreamClock(device) if is_accelerator(device) else WallClock()
