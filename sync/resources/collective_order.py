"""One order, the same on all ranks, for the collectives of different communicators on a device.

NCCL requires it: when two devices start the kernels of two communicators in different orders, each kernel may wait
forever for room that the other one takes. If one thread enqueues everything immediately, the order of submission will
do. With steps on the host in between, the collectives after them can be enqueued only later, and in the order of
submission every message would wait for the host steps of the message before it. So collectives are enqueued in rounds:
each message that is submitted moves the messages before it on by one collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .workers import Task


class Rounds:
    """Passes on collectives in an order that depends only on what has been submitted. One thread submits.

    Round ``r`` has the first collective of message ``r``, the second one of message ``r - 1``, and so on. So every lane
    and every communicator gets its work in the order of the messages, and a collective waits only for earlier rounds:
    no circle of waiting is possible.

    Args:
        put: called with each collective, in this order.
        max_phases: number of lanes of a kind. A message with more phases returns to a lane that it has used, and its
            work there must precede that of later messages; so those begin correspondingly more rounds later.
    """

    def __init__(self, put: Callable[[Task], None], max_phases: int) -> None:
        self._put, self._max_phases = put, max_phases
        self._round, self._next = 0, 0
        self._later: defaultdict[int, list[Task]] = defaultdict(list)

    def next_message(self, last_phase: int) -> None:
        """Begin the next message, and a new round. Everything submitted from now on belongs to that message.

        Args:
            last_phase: number of the message's collectives that precede its last work.
        """
        self._round = self._next
        self._next += max(1, last_phase // self._max_phases * self._max_phases)
        self._release(self._round)

    def submit(self, preceding: int, task: Task) -> None:
        """Take a collective of the current message.

        Args:
            preceding: number of collectives of the message, on any lane, before this one.
            task: issues the collective.
        """
        if preceding == 0:
            self._put(task)
        else:
            self._later[self._round + preceding].append(task)

    def end_step(self) -> None:
        """Pass on all remaining collectives. Called after the last message of a training step."""
        self._release(max(self._later, default=0))

    def _release(self, last: int) -> None:
        for number in sorted(self._later):
            if number <= last:
                for task in self._later.pop(number):
                    self._put(task)
