"""The engine: submits the stages of messages to lanes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, TypeVar

from ..messages.message import Message, Stage
from ..programs.lanes import Failed, Lanes, Route, Work, route_of, submit_stages
from ..programs.stages import Resource
from . import timeline_recorder
from .ranges import SUBMIT, in_range, is_profiling, observer
from .timeline_recorder import TimelineRecorder

T = TypeVar("T")


class Engine(Generic[T]):
    """Submits messages to lanes. One thread submits, in the same order on every rank.

    Args:
        lanes: real or virtual lanes; ``T`` is the type of their tokens.
        phases: number of collectives of the longest program.

    Attributes:
        lanes: as given.
        recorder: records what is submitted while there is no other trace; ``None`` to record nothing.
    """

    def __init__(self, lanes: Lanes[Stage, T], phases: int) -> None:
        self.lanes, self._phases = lanes, phases
        self.recorder: TimelineRecorder | None = None
        self._finishing = lanes.lane(Resource.COMPUTE, phases)

    def prepare(self, message: Message) -> Route[Stage, T]:
        """Make the lanes that a message needs, and return its route through them."""
        if message.route is None:
            message.route = route_of(self.lanes, message.stages, message.channel)
        return message.route

    def submit(self, message: Message, step: int, after: Sequence[T], last: bool = True) -> T:
        """Queue all stages of ``message`` and return the token of the last one; never blocks.

        Args:
            message: the message.
            step: number of the training step.
            after: tokens of the work that must be done before.
            last: whether this is the last message of a training step. If others are marked as well, messages with
                steps on the host of a device overlap less. If none is, call :meth:`end_step`, or collectives are held
                back.
        """
        recorder = timeline_recorder.recorder or self.recorder
        observe = observer(recorder, message, step, self._phases)
        submission = (self.lanes, self.prepare(message), step, after, observe)
        token: T
        if is_profiling():
            token = in_range(SUBMIT, functools.partial(submit_stages, *submission))
        else:
            token = submit_stages(*submission)
        if last:
            self.end_step()
        return token

    def end_step(self) -> None:
        """Declare that the next message is submitted only after all others are done."""
        self.lanes.end_step()

    def finish(self, tokens: Sequence[T], work: Work, failed: Failed) -> None:
        """Queue ``work`` behind ``tokens``; after an error, ``failed`` is called with the first error instead."""
        if (recorder := timeline_recorder.recorder or self.recorder) is not None:
            recorder.finish()
        self._finishing.submit(work, tokens, failed)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane, after which nothing runs."""
        return self.lanes.error

    def close(self) -> None:
        """Finish the queued work and end the lanes; further calls do nothing."""
        self.lanes.close()
