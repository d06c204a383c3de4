"""Clocks of recordings, which also know for how long a thread has waited for a core."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch

from ..communication.clocks import CudaClock
from ..communication.cores import Moment

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


def recording_clock(device: torch.device) -> Clock:
    """The clock of a recording on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
