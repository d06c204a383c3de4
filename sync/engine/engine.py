"""The engine: runs messages through their programs on the lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ..messages.message import Message, seed_offset
from ..programs.stages import Resource
from ..resources.communicators import Communicators
from ..resources.lanes import Lanes
from ..resources.workers import Failed, Token, Work
from . import tracing


class Engine:
    """Submits messages to the lanes. One thread submits, in the same order on every rank.

    Args:
        communicators: the process groups of the phases.
    """

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.lanes = Lanes(communicators.places.device, communicators.offloads)

    def submit(self, message: Message, step: int, after: Sequence[Token], last: bool = True) -> Token:
        """Queue all steps of ``message``; never blocks. The token is that of the last of them.

        Args:
            message: what to send.
            step: the number of the training step.
            after: must be done before.
            last: no message is submitted before this one has been done. If that is not so, and not said, messages
                with steps on the host of a device overlap less; if it is said of none, :meth:`end_step` has to be.
        """
        recorder, offset = tracing.recorder, seed_offset(step)
        self.lanes.next_message(max((stage.spec.phase for stage in message.stages), default=0))
        for stage in message.stages:
            lane = self.lanes.lane(stage.spec.resource, stage.spec.phase, message.channel)
            work: Work = functools.partial(stage.work, offset)
            if stage.begin is not None and lane.stream is None and all(token.done.is_set() for token in after):
                work = self._begun(stage.begin)
            if recorder is not None:
                work = recorder.timed(work, lane, message, stage, step)
            after = (lane.submit(work, after),)
        if last:
            self.end_step()
        (token,) = after
        return token

    def end_step(self) -> None:
        """No message is submitted before those that were have been done."""
        self.lanes.end_step()

    def _begun(self, begin: Callable[[], Callable[[], object]]) -> Work:
        """Begin now; what waits, for a lane. After a failure nothing is begun, and the lane tells of it."""
        waits: list[Callable[[], object]] = []
        self.lanes.failure.run(lambda: waits.append(begin()), None)

        def work() -> None:
            for wait in waits:
                wait()

        return work

    def finish(self, tokens: Sequence[Token], work: Work, failed: Failed) -> None:
        """Queue ``work`` behind ``tokens``; ``failed`` is told the first error when there was one."""
        self.lanes.lane(Resource.COMPUTE, self.communicators.phases).submit(work, tokens, failed)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane; nothing runs after it."""
        return self.lanes.failure.error

    def close(self) -> None:
        """Finish what is queued, end the lanes, destroy the communicators; further calls do nothing."""
        self.lanes.close()
        self.communicators.close()
