"""Measurement of a collective: trains of all sizes at several moments, and the curve through them.

Another program slows all trains of those seconds equally, so they agree with each other. Measuring again later shows
it. The quieter moment of a size counts, and a size of which no two moments agree is measured at a further one.

Calls with different roots take one of two times. With Gloo a receiver says that it is ready on the connection on which
it sends, behind all data that it is sending. So a call starts beside the one before it, or after the data of that one:
a race decides. The mean of several short trains counts there, as in a step with many messages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.programs.steps import Broadcast, Collective, Gather, Place, Reduce
from gckernels.sync.resources.stage import Issue

from ...machines.curves import CollectiveCurve, place_suffix
from .collectives import LONG_CALL_S, LONG_TRAIN, TRAIN, calls_of, train, wire_nbytes
from .fits import APART, CallCost, averaged, curve_of, quietest
from .session import Session

_SHARE_OF_LONGEST = 16  # a call may take this part of a curve's time: a train of every size takes half of it
_MOMENTS = 2  # moments among which the time of a curve is divided
_ROOTED_TRAINS = 3  # for every size and moment
_FEWEST = 5  # sizes from which on a curve is worth having if there is no time for all


class CollectiveTrains:
    """The trains of a collective, by the size of its calls and by the moment; the same on all ranks.

    Args:
        session: the measurement.
        communicators: the links.
        place: the memory of the data.
        curve_s: seconds for two moments.
    """

    def __init__(
        self, session: Session, communicators: Communicators, step: Collective, place: Place, curve_s: float
    ) -> None:
        self.step, self.place = step, place
        self._session, self._communicators, self._curve_s = session, communicators, curve_s
        self._longest_s = min(session.extent.longest_s, curve_s / _SHARE_OF_LONGEST)
        self._cost, self._least = quietest, 1  # trains of each moment
        if isinstance(step, Broadcast | Gather | Reduce):  # see the module
            self._longest_s, self._cost, self._least = min(self._longest_s, LONG_CALL_S), averaged, _ROOTED_TRAINS
        self._found: dict[int, list[list[tuple[float, float]]]] = {}  # trains of every moment, by size
        self._calls: dict[int, list[Issue]] = {}
        self._spent_s: dict[int, float] = {}  # at this moment

    def __str__(self) -> str:
        return f"{type(self.step).__name__} {self.step.level.value}{place_suffix(self.place)}"

    def begin(self, is_needed: bool = False) -> None:
        """Measure all sizes for the first time. Collective.

        Sizes grow by factors of two until a call takes too long. Then all of them take turns while the time of the
        moment lasts.

        Args:
            is_needed: whether all sizes are measured even if there is no time left.
        """
        extent = self._session.extent
        nbytes, last_s = extent.least_nbytes, 0.0
        while nbytes <= extent.largest_nbytes and 2 * last_s < self._longest_s:
            if not is_needed and not self._session.left_s():
                enough = len(self._found) >= _FEWEST
                self._session.left_out.append(f"{self} from {nbytes} bytes: no time" if enough else f"{self}: no time")
                self._found = self._found if enough else {}
                break
            self._found[nbytes] = [[]]
            last_s = self._measure(nbytes, _length(2 * last_s))
            nbytes *= 2
        self._take_turns(list(self._found))

    def again(self) -> None:
        """Measure sizes at another moment: all of them at the second one, later the disputed ones. Collective."""
        chosen = self.disputed
        for nbytes in chosen:
            self._found[nbytes].append([])
        self._take_turns(chosen)

    @property
    def disputed(self) -> list[int]:
        """The sizes that were measured at one moment only, or of which no two moments agree."""
        return [nbytes for nbytes, cost in self._costs().items() if cost.apart is None or cost.apart > APART]

    @property
    def curve(self) -> CollectiveCurve | None:
        """The curve; ``None`` if there was no time for it."""
        if not self._found:
            return None
        points = list(self._costs().values())
        return CollectiveCurve(type(self.step).__name__, self.step.level, self.place, curve_of(points))

    @property
    def error(self) -> float | None:
        """The error of the curve; ``None`` if there is none, or if it has no error."""
        found = self.curve
        return None if found is None else found.error

    def _costs(self) -> dict[int, CallCost]:
        """The cost of a call of every size."""
        topology = self._session.topology
        return {
            nbytes: self._cost(wire_nbytes(self.step, nbytes, topology), moments)
            for nbytes, moments in self._found.items()
        }

    def _take_turns(self, sizes: Sequence[int]) -> None:
        """Measure trains of sizes in turns, each while its share of the moment lasts. Small sizes vary most, and get
        most trains, and all of them at least one."""
        share_s = self._curve_s / _MOMENTS / max(len(self._found), 1)
        for turn in range(self._session.extent.trains):
            chosen = [
                nbytes
                for nbytes in sizes
                if self._spent_s.get(nbytes, 0.0) < share_s or len(self._found[nbytes][-1]) < self._least
            ]
            random.Random(turn).shuffle(chosen)  # the same on all ranks
            for nbytes in chosen:
                self._measure(nbytes, _length(self._last_s(nbytes)))
            if not chosen or not self._session.left_s():
                break
        self._calls.clear()
        self._spent_s.clear()

    def _last_s(self, nbytes: int) -> float:
        """Seconds of a call in the last train of a size."""
        return next(trains[-1][0] for trains in reversed(self._found[nbytes]) if trains)

    def _measure(self, nbytes: int, length: int) -> float:
        """Seconds of a call in another train of ``length`` calls, which is added to this moment's."""
        calls = self._calls.get(nbytes)
        if calls is None:  # its first calls find new buffers and connections
            calls = calls_of(self.step, nbytes, self._communicators, self.place, 0)
        ranks = self._session.ranks
        ranks.meet()
        wall_s, cores_s, whole_s = ranks.slowest(train(calls, self._session.places.memory(self.place), length))
        self._found[nbytes][-1].append((wall_s, cores_s))
        self._spent_s[nbytes] = self._spent_s.get(nbytes, 0.0) + whole_s
        if wall_s < LONG_CALL_S:  # others need too much memory
            self._calls[nbytes] = calls
        return wall_s


def _length(call_s: float) -> int:
    """The number of calls in a train of calls that take ``call_s`` seconds each."""
    return TRAIN if call_s < LONG_CALL_S else LONG_TRAIN
