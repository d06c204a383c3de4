"""Measurement of a collective: trains of all sizes at several moments, and the curve through them.

Another program slows all trains of those seconds equally, so they agree with each other. Measuring again later shows
it. The quieter moment of a size counts, and a size of which no two moments agree is
measured at a further one.

Calls with different roots take one of two times. With Gloo a receiver says that it is ready on the connection on which
it sends, behind all data that it is sending. So a call starts beside the one before it, or after the data of that one:
a race decides. The mean of several short trains counts there, as in a step with many messages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...communication.communicators import Communicators
from ...communication.ranks import OutOfTime
from ...planner.machines.curves import CollectiveCurve
from ...programs.steps import AllGather, AllReduce, AllToAll, Broadcast, Collective, Gather, Hop, Level, Place, Reduce
from ...resources.stage import Issue
from .fits import APART, CallCost, averaged, curve_of, quietest
from .session import Session
from .trains import LONG_CALL_S, LONG_TRAIN, TRAIN, calls_of, train, wire_nbytes

_SHARE_OF_LONGEST = 16  # a call may take this part of a curve's time: a train of every size takes half of it
_MOMENTS = 2  # moments among which the time of a curve is divided
_ALIKE = (AllReduce, AllGather, AllToAll, Hop)  # every rank sends and receives as much as any other
_WAITS = 0.25  # cores that such a collective keeps busy at most if it mostly waits for the wire
_SLOW = 1.2  # times as long for a byte as another one on the same wire
_SLOPING = 4  # sizes that tell the seconds of a byte
_ROOTED_TRAINS = 3  # for every size and moment
_FEWEST = 5  # sizes from which on a curve is worth having if there is no time for all


class CollectiveTrains:
    """The trains of a collective, by the size of its calls and by the moment; the same on all ranks.

    Args:
        session: the measurement.
        communicators: the links.
        step: the collective.
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
        self._doubted: list[int] = []  # sizes that need another moment though two agree

    def __str__(self) -> str:
        name = f"{type(self.step).__name__} {self.step.level.value}"
        return name if self.place == Place.DEVICE else f"{name} ({self.place.value})"

    def begin(self) -> None:
        """Measure all sizes for the first time. Collective.

        Sizes grow by factors of two until a call takes too long. Then all of them take turns while the time of the
        moment lasts.
        """
        try:
            self._begin()
        except OutOfTime:
            self._forget_unmeasured()
            self._found = self._found if len(self._found) >= _FEWEST else {}
            raise

    def _begin(self) -> None:
        extent, budget = self._session.extent, self._session.budget
        nbytes, last_s = extent.least_nbytes, 0.0
        while nbytes <= extent.largest_nbytes and 2 * last_s < self._longest_s:
            if not budget.allows(2 * LONG_TRAIN * last_s):
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
        self._doubted = []
        for nbytes in chosen:
            self._found[nbytes].append([])
        try:
            self._take_turns(chosen)
        finally:  # there may have been no time for some
            self._forget_unmeasured()

    def _forget_unmeasured(self) -> None:
        """Forget the moments, and the sizes, of which no train was measured."""
        known = {nbytes: [trains for trains in moments if trains] for nbytes, moments in self._found.items()}
        self._found = {nbytes: moments for nbytes, moments in known.items() if moments}

    @property
    def moments(self) -> int:
        """The number of moments at which any size was measured."""
        return max(map(len, self._found.values()), default=0)

    @property
    def again_s(self) -> float:
        """The seconds that another moment is expected to take."""
        return sum(_train_s(self._cost(self._found[nbytes]).wall_s) for nbytes in self.disputed)

    @property
    def disputed(self) -> list[int]:
        """The sizes that were measured at one moment only, or of which no two moments agree."""
        aparts = {nbytes: self._cost(moments).apart for nbytes, moments in self._found.items()}
        return [nbytes for nbytes, apart in aparts.items() if apart is None or apart > APART or nbytes in self._doubted]

    def doubt(self) -> None:
        """Take the large sizes to be disputed until they are measured at another moment."""
        self._doubted = list(self._found)[-_SLOPING:]

    @property
    def curve(self) -> CollectiveCurve | None:
        """The curve; ``None`` if there was no time for it."""
        if not self._found:
            return None
        topology = self._session.topology
        points = []
        for nbytes, moments in self._found.items():
            found = self._cost(moments)
            wire = wire_nbytes(self.step, nbytes, topology)
            points.append(CallCost(wire, found.wall_s, found.cores_s, found.apart))
        return CollectiveCurve(type(self.step).__name__, self.step.level, self.place, curve_of(points))

    def _take_turns(self, sizes: Sequence[int]) -> None:
        """Measure trains of sizes in turns, each while its share of the moment lasts. Small sizes vary most, and get
        most trains."""
        share_s = self._curve_s / _MOMENTS / max(len(self._found), 1)
        for turn in range(self._session.extent.trains):
            chosen = [
                nbytes
                for nbytes in sizes
                if self._spent_s.get(nbytes, 0.0) < share_s or len(self._found[nbytes][-1]) < self._least
            ]
            if not chosen or not self._session.budget.allows(sum(_train_s(self._last_s(nbytes)) for nbytes in chosen)):
                break
            random.Random(turn).shuffle(chosen)  # the same on all ranks
            for nbytes in chosen:
                self._measure(nbytes, _length(self._last_s(nbytes)))
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


def _train_s(call_s: float) -> float:
    """The seconds of a train of calls that take ``call_s`` seconds each."""
    return _length(call_s) * call_s


def doubt_slow(measured: Sequence[CollectiveTrains]) -> None:
    """Doubt collectives that take longer for a byte than others on the same wire.

    Where ranks mostly wait for the wire, collectives in which all of them send and receive the same take as long for a
    byte. One that takes longer may have been disturbed at all of its moments.
    """
    slopes: dict[tuple[Level, Place], list[tuple[float, CollectiveTrains]]] = {}
    for each in measured:
        found = each.curve
        if found is not None and isinstance(each.step, _ALIKE):
            curve = found.curve
            if curve.cores_s[-1] <= _WAITS * curve.wall_s[-1]:
                slopes.setdefault((found.level, found.place), []).append((curve.slope_s, each))
    for alike in slopes.values():
        least_s = min(slope_s for slope_s, _ in alike)
        for slope_s, each in alike:
            if slope_s > _SLOW * least_s:
                each.doubt()
