"""Lanes: resources that do one thing at a time, in the order of submission.

A stage is submitted to its lane with the *tokens* of the work that must be done before it, and returns a token itself.
Submission never blocks. There are three kinds of lanes:

- :class:`ThreadLane` is a queue whose work is done by threads that the lanes of the host share. It is for CPU tensors
  and Gloo, whose collectives block the calling thread (and must never be called from a future's callback).
- :class:`StreamLane` is a CUDA stream; the submitting thread enqueues the work immediately, and a token is an event.
  The host never waits.
- :class:`FedStreamLane` is both: a thread that enqueues on a stream, for programs with steps on the host of a device.
  One thread feeds the streams of collectives, in the order of :mod:`~gckernels.sync.resources.rounds`.

After an error, nothing runs on any lane of the same :class:`DeviceLanes`, because a collective after a failed one would
only wait for its timeout. Work that was submitted with ``failed`` gets the first error instead.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.futures import Future

from ..programs.lanes import IN_FLIGHT, MAX_PHASES, Failed, LaneKey, Work, lane_key
from ..programs.stages import Resource, StageSpec
from .rounds import Rounds
from .workers import Failure, Pool, Queue, Task, Token

_PATIENCE_S = 1.0  # how long closing waits for a queue after a failure

T = TypeVar("T")


class Stage(Protocol):
    """The part of a message's stage that lanes need.

    Attributes:
        spec: its specification.
        work: runs it, given the number that is added to seeds.
        begin: starts it in the calling thread and returns the future of its end; ``None`` if the lane must do it.
        issue: issues a collective, given that number, and returns a function that waits for its end; else ``None``.
    """

    @property
    def spec(self) -> StageSpec: ...

    @property
    def work(self) -> Callable[[int], None]: ...

    @property
    def begin(self) -> Callable[[], Future[Any]] | None: ...

    @property
    def issue(self) -> Callable[[int], Callable[[], object]] | None: ...


class Lane(ABC):
    """One lane.

    Attributes:
        name: its name.
        failure: the failure that all lanes share.
        stream: the stream on which work is enqueued; ``None`` if the host does the work.
    """

    def __init__(self, name: str, failure: Failure, stream: torch.cuda.Stream | None = None) -> None:
        self.name, self.failure, self.stream = name, failure, stream

    def submit_stage(self, stage: Stage, offset: int, after: Sequence[Token]) -> Token:
        """Queue a stage and return its token; never blocks.

        On the host, the calling thread starts a stage with ``begin`` itself if everything before it is done. The lane
        has no part in it then: several such stages can be in progress.

        Args:
            stage: the stage.
            offset: number that is added to the seeds of its units in this training step.
            after: tokens of the work that must be done before.
        """
        if stage.begin is not None and self.stream is None and all(token.is_done for token in after):
            token = Token()
            self.start(stage.begin, lambda error: token.end())
            return token
        return self._add(stage.work, (offset,), after, None)

    def start(self, begin: Callable[[], Future[Any]], ended: Callable[[BaseException | None], T]) -> Future[T]:
        """Call ``begin`` now, unless there was an error, and return a future of what ``ended`` returns.

        Args:
            begin: starts some work, and returns the future of its end.
            ended: called when the work has ended, perhaps by the thread that has done it: with the error if it has
                failed, else with ``None``. After an earlier error it is called immediately, with that. It must not
                raise, and must not wait.
        """
        if self.failure.error is None:
            try:
                return begin().then(functools.partial(self._ended, ended))
            except BaseException as error:
                self.failure.set(error)
        failed: Future[T] = Future()
        failed.set_result(ended(self.failure.error))
        return failed

    def _ended(self, ended: Callable[[BaseException | None], T], future: Future[Any]) -> T:
        try:
            future.value()
        except BaseException as error:
            self.failure.set(error)
            return ended(error)
        return ended(None)

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        """Queue ``work`` behind the work of this lane and behind ``after``; never blocks.

        Args:
            work: the work, called without arguments.
            after: tokens of the work that must be done before.
            failed: called with the first error, if there is one, instead of or after ``work``.
        """
        return self._add(work, (), after, failed)

    @abstractmethod
    def _add(self, work: Work, arguments: tuple[int, ...], after: Sequence[Token], failed: Failed | None) -> Token:
        """Queue ``work(*arguments)``, as :meth:`submit`."""

    def _enqueue(
        self, work: Work, arguments: tuple[int, ...], after: Sequence[Token], failed: Failed | None
    ) -> torch.cuda.Event:
        """Run ``work``, which enqueues kernels, on the stream behind the events of ``after``; an event behind it."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            for before in after:
                if before.event is not None:
                    self.stream.wait_event(before.event)
            self.failure.run(work, arguments, failed)
        return _event_behind(self.stream)


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
        failure: Failure,
        queue: Queue,
        stream: torch.cuda.Stream | None = None,
        put: Callable[[Task], None] | None = None,
    ) -> None:
        super().__init__(name, failure, stream)
        self.queue = queue
        self._put = queue.put if put is None else put
        self._issuing = Queue(queue.pool)
        self._in_flight: deque[Token] = deque(maxlen=IN_FLIGHT)  # the last collectives, which may have ended

    @property
    def queues(self) -> tuple[Queue, Queue]:
        """The queue, and that of the tasks that issue collectives."""
        return self.queue, self._issuing

    def submit_stage(self, stage: Stage, offset: int, after: Sequence[Token]) -> Token:
        if stage.issue is None or self.stream is not None:
            return super().submit_stage(stage, offset, after)
        if len(self._in_flight) == IN_FLIGHT:
            after = (*after, self._in_flight[0])
        collective = _Collective(stage.issue)
        issued = Task(self._issuing, self._execute, collective.issue, (offset,), after, None)
        self._issuing.put(issued)
        ended = self._add(collective.wait, (), (issued,), None)
        self._in_flight.append(ended)
        return ended

    def _add(self, work: Work, arguments: tuple[int, ...], after: Sequence[Token], failed: Failed | None) -> Token:
        task = Task(self.queue, self._execute, work, arguments, after, failed)
        self._put(task)
        return task

    def _execute(self, task: Task) -> None:
        try:
            self._do(task)
        except BaseException as error:  # raised by a device, not by the work
            self.failure.set(error)
            self.failure.run(task.work, task.arguments, task.failed)  # only calls ``failed``

    def _do(self, task: Task) -> None:
        for before in task.after:
            if before.event is not None:
                before.event.synchronize()
        self.failure.run(task.work, task.arguments, task.failed)


class _Collective:
    """A collective between two tasks.

    Args:
        issue: issues it, and returns a function that waits for its end.
    """

    __slots__ = ("_issue", "_wait")

    def __init__(self, issue: Callable[[int], Callable[[], object]]) -> None:
        self._issue = issue

    def issue(self, offset: int) -> None:
        self._wait = self._issue(offset)

    def wait(self) -> None:
        self._wait()


class StreamLane(Lane):
    """A CUDA stream on which the submitting thread enqueues work, behind the events of ``after``.

    No token in ``after`` may be that of a thread.
    """

    def _add(self, work: Work, arguments: tuple[int, ...], after: Sequence[Token], failed: Failed | None) -> Token:
        return Token(self._enqueue(work, arguments, after, failed), is_done=True)


class FedStreamLane(ThreadLane):
    """A CUDA stream on which a thread enqueues work in the order of submission.

    It is for messages with steps on the host. Work after such a step can be enqueued only when a host thread has
    finished, and the submitting thread must not wait for that. All lanes of the device are then of this kind, so that
    each stream still gets its work in the order of submission.
    """

    def _do(self, task: Task) -> None:
        task.event = self._enqueue(task.work, task.arguments, task.after, task.failed)


class DeviceLanes:
    """The lanes of one engine: for each phase one to compute, and one per channel to communicate.

    A lane is created when it is first used. The number of collectives before a stage decides its lane, so the first
    encoding of a message never queues behind the second encoding of the previous message.

    No deadlock is possible. Messages are submitted one after the other, with all of their stages, in the same order on
    all ranks. So the first unfinished stage of the first unfinished message waits for nothing, on any rank. In rounds,
    the same is true of the first unfinished collective of the first round.

    Args:
        device: the device of the gradients, which decides the kind of lanes.
        offloads: whether some stages run on the host of a device.
    """

    def __init__(self, device: torch.device, offloads: bool = False) -> None:
        self.device = device
        self.failure = Failure()
        self._lanes: dict[tuple[LaneKey, int], Lane] = {}
        self._streams: dict[LaneKey, torch.cuda.Stream] = {}
        self._pools = [Pool("lanes", self.failure)]
        self._feeder = self._thread("collectives") if offloads and device.type == "cuda" else None
        self._rounds = None if self._feeder is None else Rounds(self._feeder.put, MAX_PHASES)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane, after which nothing runs."""
        return self.failure.error

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> Lane:
        """The lane of :func:`~gckernels.sync.programs.lanes.lane_key`."""
        shared = lane_key(resource, phase, channel)
        # lanes in rounds need the full number of the phase
        key = (shared, phase if self._is_in_rounds(resource) else shared.phase)
        if key not in self._lanes:
            self._lanes[key] = self._new(shared, phase)
        return self._lanes[key]

    def _new(self, key: LaneKey, phase: int) -> Lane:
        if self.device.type != "cuda" or key.resource.on_host:
            communicates = key.resource.does == "communicate"
            return ThreadLane(key.name, self.failure, Queue(self._pools[0], keeps_thread=communicates))
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._streams[key]
        if self._feeder is None or self._rounds is None:
            return StreamLane(key.name, self.failure, stream)
        if self._is_in_rounds(key.resource):
            put = functools.partial(self._rounds.submit, phase)
            return FedStreamLane(key.name, self.failure, self._feeder, stream, put)
        return FedStreamLane(key.name, self.failure, self._thread(key.name), stream)

    def _thread(self, name: str) -> Queue:
        """A queue with a separate thread. Memory for temporaries belongs to a pair of thread and stream."""
        self._pools.append(Pool(name, self.failure))
        return Queue(self._pools[-1])

    def _is_in_rounds(self, resource: Resource) -> bool:
        """Whether lanes of ``resource`` get their work in the order of rounds."""
        return self._rounds is not None and resource.does == "communicate" and not resource.on_host

    def next_message(self, last_phase: int) -> None:
        """Begin the next message, to which everything submitted from now on belongs.

        Args:
            last_phase: phase of its last stage.
        """
        if self._rounds is not None:
            self._rounds.next_message(last_phase)

    def end_step(self) -> None:
        """Declare that the next message is submitted only after all others are done."""
        if self._rounds is not None:
            self._rounds.end_step()

    @property
    def starts_immediately(self) -> bool:
        """Whether the submitting thread may start a collective itself, in the order of all collectives."""
        return self._rounds is None

    def here(self) -> Token:
        """A token for the work of the calling thread so far (on a device, that on the current stream)."""
        on_cuda = self.device.type == "cuda"
        return Token(_event_behind(torch.cuda.current_stream(self.device)) if on_cuda else None, is_done=True)

    def settle(self) -> None:
        """After a failure, wait until no thread computes. Collectives, which may wait for their timeouts, go on."""
        for (key, _), lane in list(self._lanes.items()):  # a copy: another thread may create a lane
            if key.resource.does == "compute" and isinstance(lane, ThreadLane):
                lane.queue.settle()

    def close(self) -> None:
        """Finish all work, also on the device, and close all lanes; further calls do nothing.

        After a failure the device is not waited for, because it may be in a collective that never ends.
        """
        self.end_step()
        if not any(pool.runs_here for pool in self._pools):
            self._drain()
        for pool in list(self._pools):
            pool.close()
        for stream in list(self._streams.values()):
            if self.failure.error is None:
                stream.synchronize()

    def _drain(self) -> None:
        """Wait until all queued work is done; after a failure, at most one second for each queue, which may be stuck.

        Nothing may be submitted meanwhile.
        """
        lanes = [lane for lane in list(self._lanes.values()) if isinstance(lane, ThreadLane)]
        queues = {queue for lane in lanes for queue in lane.queues}
        for end in [queue.last() for queue in queues]:
            while not end.join(_PATIENCE_S) and self.failure.error is None:
                pass


def _event_behind(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind the work on ``stream``. A thread that waits for the event sleeps instead of polling."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
