"""The engine: runs messages through their programs on the lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from . import tracing
from .communicators import MOST_PHASES, Communicators
from .lanes import Failed, Lanes, Resource, Token, Work
from .message import Message


class Engine:
    """Submits messages to the lanes. One thread submits, in the same order on every rank.

    Args:
        communicators: the process groups of the phases.
    """

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.lanes = Lanes(communicators.places.device, communicators.offloads)

    def submit(self, message: Message, step: int, after: Token) -> Token:
        """Queue all steps of ``message`` for training step ``step``; never blocks. The token is that of the last."""
        recorder, token = tracing.recorder, after
        for stage in message.stages:
            lane = self.lanes.lane(stage.resource, stage.phase % MOST_PHASES, message.channel)
            work: Work = functools.partial(stage.work, step)
            if stage.begin is not None and lane.stream is None and token.done.is_set():
                work = self._begun(stage.begin)
            if recorder is not None:
                work = recorder.timed(work, lane, message, stage, step)
            token = lane.submit(work, (token,))
        return token

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
        self.lanes.lane(Resource.COMPUTE, self.communicators.phases % MOST_PHASES).submit(work, tokens, failed)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane; nothing runs after it."""
        return self.lanes.failure.error

    def close(self) -> None:
        """Finish what is queued, end the lanes, destroy the communicators; further calls do nothing."""
        self.lanes.close()
        self.communicators.close()
