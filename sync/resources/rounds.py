"""Rounds: one order, the same on all ranks, for the collectives of different communicators on a device.

NCCL asks for it: kernels of two communicators that two devices start in different orders may each wait for the other's
room. Where one thread enqueues everything at once, that order is the order of submission. Where steps on the host come
between, what follows them can be enqueued only later, and in the order of submission every message would wait for the
host steps of the one before. So work is put in rounds: with each message that is submitted, the ones before it move on
by one collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .workers import Work


class Rounds:
    """Puts work, which one thread submits, into an order that follows from what is submitted alone.

    Round ``r`` has the first collective of message ``r``, the second one of message ``r - 1``, and so on. So on each
    lane and each communicator work is in the order of the messages, and whatever a collective waits for is in an
    earlier round: nothing waits in a circle. With the last message of a training step the rounds that are left follow.

    Args:
        put: takes work in that order.
        most_phases: number of lanes of a kind. Longer messages come to a lane again, where they must come before the
            messages behind them; those begin as many rounds later.
    """

    def __init__(self, put: Callable[[Work], None], most_phases: int) -> None:
        self._put, self._most_phases = put, most_phases
        self._round, self._next = 0, 0
        self._later: defaultdict[int, list[Work]] = defaultdict(list)

    def next_message(self, last_phase: int) -> None:
        """Begin another message, and with it a round: all that is submitted from now on is of that message.

        Args:
            last_phase: collectives that come before the last work of the message.
        """
        self._round = self._next
        self._next += max(1, last_phase // self._most_phases * self._most_phases)
        self._release(self._round)

    def submit(self, preceding: int, work: Work) -> None:
        """Take the collective of the present message that ``preceding`` others, wherever they are, come before."""
        if preceding == 0:
            self._put(work)
        else:
            self._later[self._round + preceding].append(work)

    def end_step(self) -> None:
        """No message follows for now: put what is left."""
        self._release(max(self._later, default=0))

    def _release(self, last: int) -> None:
        for number in sorted(self._later):
            if number <= last:
                for work in self._later.pop(number):
                    self._put(work)
