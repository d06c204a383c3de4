"""The engine: submits the stages of messages to lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch.futures import Future

from ..communication.communicators import Communicators
from ..messages.message import DenseMessage, Message
from ..programs.lanes import Route, route_of, submit_stages
from ..programs.stages import Resource
from ..resources.lane_kinds import Lane
from ..resources.lanes import DeviceLanes
from ..resources.stage import Stage
from ..resources.workers import Failed, Token, Work
from . import recorded_step
from .failures import Failures
from .ranges import SUBMIT, in_range, is_profiling, observer

if TYPE_CHECKING:
    from .timeline_recorder import TimelineRecorder

R = TypeVar("R")


class Engine:
    """Submits messages to lanes. One thread submits, in the same order on every rank.

    Args:
        lanes: the lanes of the rank.
        phases: number of collectives of the longest program.
        communicators: the process groups of the messages, for errors.

    Attributes:
        lanes: as given.
        failures: the first error of the lanes, with what other ranks say of it.
        step_recorder: records what is submitted while there is no other trace; ``None`` to record nothing.
    """

    def __init__(self, lanes: DeviceLanes, phases: int, communicators: Communicators | None = None) -> None:
        self.lanes, self._phases, self.failures = lanes, phases, Failures(lanes.failure, communicators)
        self.step_recorder: TimelineRecorder | None = None
        self._finishing = lanes.lane(Resource.COMPUTE, phases)

    @property
    def _recorder(self) -> TimelineRecorder | None:
        return recorded_step.timeline or self.step_recorder

    def prepare(self, message: Message) -> Route[Stage, Token]:
        """Make the lanes that a message needs, and return its route through them."""
        if message.route is None:
            stages = [replace(stage, keys=message.keys) for stage in message.stages]
            message.route = route_of(self.lanes, stages, message.channel)
        return message.route

    def submit(self, message: Message, step: int, after: Sequence[Token]) -> Token:
        """Queue all stages of ``message`` and return the token of the last one; never blocks.

        Behind the last message of a training step, call :meth:`DeviceLanes.end_step`, or collectives are held back.

        Args:
            step: number of the training step.
            after: tokens of the work that must be done before.
        """
        self.failures.step = step
        observe = observer(self._recorder, message, step, self._phases)
        submission = functools.partial(submit_stages, self.lanes, self.prepare(message), after, observe)
        return in_range(SUBMIT, submission) if is_profiling() else submission()

    def start_average(
        self, message: DenseMessage, step: int, ended: Callable[[BaseException | None], R]
    ) -> Future[R] | None:
        """Start the only message of a bucket in the calling thread, and return a future of what ``ended`` returns.
        Return ``None``, without doing anything, if the message must be submitted to its lane.

        No lane has a part in the average, so nothing waits for another thread or for another bucket. On the host of a
        device, one thread issues all collectives. The times of work on a device are recorded on its lane.

        Args:
            step: number of the training step.
            ended: as for :meth:`~gckernels.sync.resources.lane_kinds.Lane.start`.
        """
        ((stage, lane),), recorder = self.prepare(message).stops, self._recorder
        assert isinstance(lane, Lane)
        self.failures.step = step
        if not self.lanes.starts_immediately or (recorder is not None and lane.stream is not None):
            return None
        if (observe := observer(recorder, message, step, self._phases)) is not None:
            stage = observe(stage, lane)
        if recorder is not None:
            recorder.finish()
        return lane.start(stage, ended)

    def finish(self, tokens: Sequence[Token], work: Work, failed: Failed) -> None:
        """Queue ``work`` behind ``tokens``; after an error, ``failed`` is called with the first error instead."""
        if (recorder := self._recorder) is not None:
            recorder.finish()
        self._finishing.submit(work, tokens, failed)
