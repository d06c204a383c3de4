"""Clocks that mark moments of a step: on the host, or in the work that is queued on a GPU."""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias

import torch

from .cores import Moment

Mark: TypeAlias = "Moment | torch.cuda.Event"


class Clock(Protocol):
    """Marks moments, and later says how far they are apart."""

    def mark(self) -> Mark:
        """A mark of this moment."""

    def seconds(self, first: Mark, second: Mark) -> float:
        """The seconds between two marks. On a GPU the host waits until both are reached."""

    def waiting_s(self, first: Mark, second: Mark) -> float:
        """The seconds of them in which the thread waited for a core that other threads had. On a GPU there are none."""


class HostClock:
    """The clock of a training on the CPU."""

    def mark(self) -> Mark:
        return Moment.now()

    def seconds(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, Moment) and isinstance(second, Moment)
        return second.elapsed_s(first)

    def waiting_s(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, Moment) and isinstance(second, Moment)
        return second.waiting_s(first)


class WallClock:
    """The clock of a training on the CPU for whoever only asks how far marks are apart. It takes a tenth of the time of
    :class:`HostClock`."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """The clock of a training on a GPU: marks are events in its current stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event)
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) * 1e-3

    def waiting_s(self, first: Mark, second: Mark) -> float:
        return 0.0


def clock_of(device: torch.device) -> Clock:
    """The clock of a training on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
