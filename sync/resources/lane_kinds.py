"""The kinds of lanes: queues of threads, streams of an accelerator, and streams that threads feed.

A stage is submitted to its lane with the *tokens* of the work that must be done before it, and returns a token itself.
Submission never blocks.

- :class:`ThreadLane` is a queue whose work is done by threads that the lanes of the host share. It is for CPU tensors
  and Gloo, whose collectives block the calling thread (and must never be called from a future's callback).
- :class:`StreamLane` is a stream of an accelerator; the submitting thread enqueues the work immediately, and a token is
  an event. The host never waits.
- :class:`FedStreamLane` is both: a thread that enqueues on a stream, for programs with steps on the host of a device.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.futures import Future

from gckernels.devices import event_behind, on_stream

from ..programs.lanes import IN_FLIGHT
from .stage import Stage
from .workers import Failed, LaneFailure, Queue, Task, Token, Work

T = TypeVar("T")


class Lane(ABC):
    """One lane.

    Attributes:
        name: its name.
        failure: the failure that all lanes share.
        stream: the stream on which work is enqueued; ``None`` if the host does the work.
    """

    def __init__(self, name: str, failure: LaneFailure, stream: torch.Stream | None = None) -> None:
        self.name, self.failure, self.stream = name, failure, stream

    def submit_stage(self, stage: Stage, after: Sequence[Token]) -> Token:
        """Queue a stage and return its token; never blocks.

        On the host, the calling thread starts a stage with ``begin`` itself if everything before it is done. The lane
        has no part in it then: several such stages can be in progress.

        Args:
            after: tokens of the work that must be done before.
        """
        if stage.begin is not None and self.stream is None and all(token.is_done for token in after):
            token = Token()
            self.start(stage, lambda error: token.end())
            return token
        is_compute = stage.spec.resource.does == "compute"
        work = stage.work if is_compute else functools.partial(self.failure.watch, stage, stage.work)
        return self.submit(work, after)

    def start(self, stage: Stage, ended: Callable[[BaseException | None], T]) -> Future[T]:
        """Begin a stage now, unless there was an error, and return a future of what ``ended`` returns.

        Args:
            stage: the stage, which has ``begin``.
            ended: called when the work has ended, perhaps by the thread that has done it: with the error if it has
                failed, else with ``None``. After an earlier error it is called immediately, with that. It must not
                raise, and must not wait.
        """
        if self.failure.error is None:
            try:
                assert stage.begin is not None
                return stage.begin().then(functools.partial(self._ended, stage, ended))
            except BaseException as error:
                self.failure.set(error, stage)
        failed: Future[T] = Future()
        failed.set_result(ended(self.failure.error))
        return failed

    def _ended(self, stage: Stage, ended: Callable[[BaseException | None], T], future: Future[Any]) -> T:
        try:
            future.value()
        except BaseException as error:
            self.failure.set(error, stage)
            return ended(error)
        return ended(None)

    @abstractmethod
    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        """Queue ``work`` behind the work of this lane and behind ``after``; never blocks.

        Args:
            after: tokens of the work that must be done before.
            failed: called with the first error, if there is one, instead of or after ``work``.
        """

    def _enqueue(self, work: Work, after: Sequence[Token], failed: Failed | None) -> torch.Event:
        """Run ``work``, which enqueues kernels, on the stream behind the events of ``after``; an event behind it."""
        assert self.stream is not None
        with on_stream(self.stream):
            for before in after:
                if before.event is not None:
                    self.stream.wait_event(before.event)
            self.failure.run(work, failed)
        return event_behind(self.stream)


class ThreadLane(Lane):
    """A queue whose work threads of the host do.

    A collective is two tasks. One issues it, as soon as what it sends is ready; the other, behind those of the
    collectives before, waits for its end. At most :data:`~gckernels.sync.programs.lanes.IN_FLIGHT` collectives of a
    lane are on their way.

    Args:
        name: name of the lane.
        failure: the failure that all lanes share.
        queue: the queue; others may share it.
        stream: the stream on which work is enqueued; ``None`` if the thread itself does the work.
        put: puts tasks into the queue, perhaps later.
    """

    def __init__(
        self,
        name: str,
        failure: LaneFailure,
        queue: Queue,
        stream: torch.Stream | None = None,
        put: Callable[[Task], None] | None = None,
    ) -> None:
        super().__init__(name, failure, stream)
        self.queue = queue
        self._put = queue.put if put is None else put
        self._issuing = Queue(queue.pool)
        self._in_flight: deque[Token] = deque(maxlen=IN_FLIGHT)  # the last collectives, which may have ended

    @property
    def queues(self) -> tuple[Queue, Queue]:
        """The queue, and the queue of the tasks that issue collectives."""
        return self.queue, self._issuing

    def submit_stage(self, stage: Stage, after: Sequence[Token]) -> Token:
        if stage.issue is None or self.stream is not None:
            return super().submit_stage(stage, after)
        if len(self._in_flight) == IN_FLIGHT:
            after = (*after, self._in_flight[0])
        collective = _Collective(stage, self.failure)
        issued = Task(self._issuing, self._execute, collective.issue, after, None)
        self._issuing.put(issued)
        ended = self.submit(collective.wait, (issued,))
        self._in_flight.append(ended)
        return ended

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        task = Task(self.queue, self._execute, work, after, failed)
        self._put(task)
        return task

    def _execute(self, task: Task) -> None:
        try:
            self._do(task)
        except BaseException as error:  # raised by a device, not by the work
            self.failure.set(error)
            self.failure.run(task.work, task.failed)  # only calls ``failed``

    def _do(self, task: Task) -> None:
        for before in task.after:
            if before.event is not None:
                before.event.synchronize()
        self.failure.run(task.work, task.failed)


class _Collective:
    """A collective between two tasks.

    Args:
        failure: gets its error.
    """

    __slots__ = ("_failure", "_stage", "_wait")

    def __init__(self, stage: Stage, failure: LaneFailure) -> None:
        self._stage, self._failure = stage, failure

    def issue(self) -> None:
        assert self._stage.issue is not None
        self._wait = self._failure.watch(self._stage, self._stage.issue)

    def wait(self) -> None:
        self._failure.watch(self._stage, self._wait)


class StreamLane(Lane):
    """A stream on which the submitting thread enqueues work, behind the events of ``after``.

    No token in ``after`` may be that of a thread.
    """

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        return Token(self._enqueue(work, after, failed), is_done=True)


class FedStreamLane(ThreadLane):
    """A stream on which a thread enqueues work in the order of submission.

    It is for messages with steps on the host. Work after such a step can be enqueued only when a host thread has
    finished, and the submitting thread must not wait for that. All lanes of the device are then of this kind, so that
    each stream still gets its work in the order of submission.
    """

    def _do(self, task: Task) -> None:
        task.event = self._enqueue(task.work, task.after, task.failed)
