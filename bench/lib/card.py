"""The GPU seen as a clock: CUDA graphs, events, and memory that is not in the cache when it is read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

MOST_SETS = 64  # of tensors: with more, capturing small calls would take longer than measuring them
FEWEST_CALLS = 8  # in a graph, so that starting it does not count
TIMED_S = 0.1  # about, of all rounds of a measurement
FEWEST_ROUNDS, MOST_ROUNDS = 5, 51


@dataclass(frozen=True)
class Quartiles:
    """Seconds of one call, over the rounds.

    Attributes:
        how: ``"graph"``, or ``"stream"`` where the calls cannot be captured: the host's time is in it then, if the host
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
        """Bytes of memory that can still be allocated, those included that torch holds and does not use."""
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def num_sets(self, nbytes: int) -> int:
        """Sets of tensors of ``nbytes`` each that calls take turns on so that each finds its own set out of the cache:
        together four times the L2 cache; but two to :data:`MOST_SETS`, and one where memory is short."""
        wanted = min(max(2, math.ceil(4 * self.l2_nbytes / max(1, nbytes))), MOST_SETS)
        return max(1, min(wanted, int(0.9 * self.free_nbytes) // max(1, nbytes)))

    def stays_in_l2(self, nbytes: int, sets: int) -> bool:
        """Whether ``sets`` of tensors of ``nbytes`` are few and small enough to be found in the L2 cache again."""
        return nbytes * sets < 2 * self.l2_nbytes

    def clean_l2(self) -> None:
        """Fill the L2 cache with what need not be written back, by reading more than it holds."""
        if self._swept is None:
            self._swept = torch.zeros(self.l2_nbytes, device=self.device)  # of fp32: four times the cache
        self._swept.sum()

    def graph(self, calls: Sequence[Call]) -> Call:
        """A function that repeats ``calls`` as one CUDA graph. They run twice before, so that all is compiled.

        Raises:
            RuntimeError: one of them cannot be captured.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
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
        try:
            return self.graph(calls), "graph"
        except RuntimeError:
            torch.cuda.synchronize()

        def in_the_stream() -> None:
            for call in calls:
                call()

        return in_the_stream, "stream"

    def seconds(self, work: Call, rounds: int, before: Call | None = None) -> list[float]:
        """Seconds that the GPU takes for ``work``, in each of ``rounds``.

        Args:
            before: put into the stream ahead of each round and waited for.
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
        """The time of one of ``calls``, which do the same to different sets of tensors, in turns."""
        turns = list(calls) * math.ceil(FEWEST_CALLS / len(calls))
        work, how = self.repeated(turns)
        once_s = max(self.seconds(work, 2)[1], 1e-6)
        rounds = min(max(FEWEST_ROUNDS, int(TIMED_S / once_s)), MOST_ROUNDS)
        seconds = [each / len(turns) for each in self.seconds(work, rounds)]
        low_s, median_s, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
        return Quartiles(low_s, median_s, high_s, how)
