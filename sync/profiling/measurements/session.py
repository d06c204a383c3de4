"""A measurement in progress: its ranks, its budget, what it may measure, and what it had to leave out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...communication.ranks import Budget, OutOfTime, Ranks
from ...programs.topology import Topology
from ...resources.memory_spaces import Places

KI, MI = 1 << 10, 1 << 20


@dataclass(frozen=True)
class MeasurementExtent:
    """How much is measured.

    Attributes:
        least_nbytes: smallest size of a collective.
        largest_nbytes: largest size of a collective.
        longest_s: seconds of the longest call.
        curve_s: seconds of a collective at most, which its sizes and two moments share; more while these disagree.
        trains: the number of trains of each size that are measured at one moment at most.
        rounds: the number of times that anything else is measured.
        elements: the numbers of elements of codecs with one unit.
        many: pairs of units and elements.
        beside_s: seconds that something runs beside a backward, and a backward alone.
        far_caches: bytes that pass through the caches before a buffer is used again, relative to the largest cache.
    """

    least_nbytes: int = KI
    largest_nbytes: int = 64 * MI
    longest_s: float = 0.15
    curve_s: float = 2.5
    trains: int = 24
    rounds: int = 4
    elements: tuple[int, ...] = tuple(4 * KI << shift for shift in range(0, 13, 2))
    many: tuple[tuple[int, int], ...] = (
        (16, 64 * KI),
        (16, MI),
        (128, 256 * KI),
        (128, 4 * MI),
    )
    beside_s: float = 0.15
    far_caches: float = 4.0

    @staticmethod
    def of(seconds: float) -> MeasurementExtent:
        """The extent for a budget: less in everything below 30 seconds."""
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
    """A measurement in progress.

    Attributes:
        ranks: all ranks.
        budget: the seconds that it may take.
        places: the memories of this rank.
        topology: topology of the ranks.
        extent: how much is measured.
        progress: called with the share of the budget that is spent, and the name of the part that begins.
        clock: the seconds of calls that only compute. It stands still while other threads have the cores, and is faster
            by the factor by which ranks slow down each other.
        left_out: what did not fit into the budget, for people.
    """

    ranks: Ranks
    budget: Budget
    places: Places
    topology: Topology
    extent: MeasurementExtent
    progress: Callable[[float, str], object]
    clock: Callable[[], float] = time.perf_counter
    left_out: list[str] = field(default_factory=list)
    _seconds: dict[str, list[float]] = field(default_factory=dict)

    def part(self, kind: str, name: str, measure: Callable[[], None], expected_s: float = 0.0) -> None:
        """Measure a part if it fits into the budget, or note that it was left out. Collective.

        A part that takes far longer than expected is cut off when the budget is spent.

        Args:
            kind: its kind; a part is expected to take as long as those of its kind did on average.
            name: its name, for people.
            measure: measures it.
            expected_s: seconds that the first part of a kind is expected to take.
        """
        known = self._seconds.setdefault(kind, [])
        if not self.budget.allows(statistics.mean(known) if known else expected_s):
            self.left_out.append(f"{name}: no time")
            return
        self.progress(min(self.budget.spent_s / self.budget.seconds, 1.0), name)
        start_s = time.monotonic()
        try:
            measure()
        except OutOfTime:
            self.left_out.append(f"{name}: it took too long")
            return
        known.append(time.monotonic() - start_s)
