"""Timing on a GPU: CUDA graphs, events, and tensors that are not in the L2 cache when they are read."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

MAX_SETS = 64  # sets of tensors; with more, capturing small calls would take longer than measuring them
MIN_CALLS = 8  # calls in a graph, so that the cost of starting the graph is negligible
TIMED_S = 0.1  # approximate time of all rounds of a measurement
MIN_ROUNDS, MAX_ROUNDS = 5, 51


@dataclass(frozen=True)
class Quartiles:
    """Quartiles of the seconds of one call over the rounds.

    Attributes:
        how: ``"graph"``, or ``"stream"`` if the calls cannot be captured; the time then includes the host's if the host
            is slower than the GPU.
    """

    low_s: float
    median_s: float
    high_s: float
    how: str


class Card:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_nbytes: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._swept: torch.Tensor | None = None

    @property
    def free_nbytes(self) -> int:
        """Bytes of memory that can still be allocated, including memory that torch has reserved but does not use."""
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def num_sets(self, nbytes: int) -> int:
        """The number of sets of tensors, ``nbytes`` each, to cycle through so that no call finds its set in the cache.

        Together the sets are four times as large as the L2 cache. There are at least two and at most :data:`MAX_SETS`
        of them, fewer if memory is short.
        """
        wanted = min(max(2, math.ceil(4 * self.l2_nbytes / max(1, nbytes))), MAX_SETS)
        return max(1, min(wanted, int(0.9 * self.free_nbytes) // max(1, nbytes)))

    def stays_in_l2(self, nbytes: int, sets: int) -> bool:
        """Whether ``sets`` sets of tensors, ``nbytes`` each, are small enough to be found in the L2 cache again."""
        return nbytes * sets < 2 * self.l2_nbytes

    def clean_l2(self) -> None:
        """Fill the L2 cache with lines that need no writing back, by reading more than it holds."""
        if self._swept is None:
            self._swept = torch.zeros(self.l2_nbytes, device=self.device)  # fp32: four times the size of the cache
        self._swept.sum()

    def graph(self, calls: Sequence[Call]) -> Call:
        """A function that repeats ``calls`` as one CUDA graph; the calls run twice before, so that all is compiled.

        Raises:
            RuntimeError: a call cannot be captured, because the host waits for the GPU in it or for another reason.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            with _host_does_not_wait():  # found here: torch does not recover from a capture that fails
                for call in calls:
                    call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return graph.replay

    def repeated(self, calls: Sequence[Call]) -> tuple[Call, str]:
        """``(work, how)``: a function that repeats ``calls``, and whether by a ``"graph"`` or in the ``"stream"``."""
        stream = torch.cuda.current_stream()
        try:
            return self.graph(calls), "graph"
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream the current one
            torch.cuda.synchronize()

        def in_the_stream() -> None:
            for call in calls:
                call()

        return in_the_stream, "stream"

    def seconds(self, work: Call, rounds: int, before: Call | None = None) -> list[float]:
        """Seconds that the GPU takes for ``work``, in each of ``rounds``.

        Args:
            work: enqueues the work to time in the current stream.
            rounds: number of repetitions.
            before: called before each round and waited for.
        """
        events = []
        for _ in range(rounds):
            if before is not None:
                before()
                torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def time(self, calls: Sequence[Call]) -> Quartiles:
        """The time of one call; ``calls`` do the same work on different sets of tensors, in turns."""
        turns = list(calls) * math.ceil(MIN_CALLS / len(calls))
        work, how = self.repeated(turns)
        once_s = max(self.seconds(work, 2)[1], 1e-6)
        rounds = min(max(MIN_ROUNDS, int(TIMED_S / once_s)), MAX_ROUNDS)
        seconds = [each / len(turns) for each in self.seconds(work, rounds)]
        low_s, median_s, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
        return Quartiles(low_s, median_s, high_s, how)


@contextlib.contextmanager
def _host_does_not_wait() -> Iterator[None]:
    """In the ``with`` block, calls in which the host waits for the GPU raise a RuntimeError."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
