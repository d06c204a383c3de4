"""Lanes: resources that do one thing at a time, in the order of submission.

Each stage of a message is submitted to its lane with the *tokens* of everything that must be done before it, and
returns a token. Submission never blocks. There are three kinds of lanes:

- :class:`ThreadLane` is a worker thread, for CPU tensors and Gloo. Gloo's collectives block the calling thread, and
  must never be called in a future's callback. A token is set when the work is done.
- :class:`StreamLane` is a CUDA stream. The submitting thread enqueues the work immediately, a token is an event, and
  the host never waits.
- :class:`FedStreamLane` is a worker thread that enqueues on a CUDA stream, for programs with steps on the host of a
  device. One thread feeds the streams of all collectives, in the order of :mod:`~gckernels.sync.resources.rounds`.

After an error nothing that is submitted to the same :class:`DeviceLanes` runs any more: a collective would only wait
for its timeout. Instead, every ``failed`` callback is called with the first error.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..programs.lanes import MAX_PHASES, LaneKey, lane_key
from ..programs.stages import Resource, StageSpec
from .rounds import Rounds
from .workers import Failed, Failure, Token, Work, Worker


class Stage(Protocol):
    """A stage of a message, as lanes see it.

    Attributes:
        spec: kind and lane of the stage.
        work: does the work, given the number that is added to seeds.
        begin: starts the work in the calling thread and returns a function that waits for its end; ``None`` for stages
            that cannot start immediately.
    """

    @property
    def spec(self) -> StageSpec: ...

    @property
    def work(self) -> Callable[[int], None]: ...

    @property
    def begin(self) -> Callable[[], Callable[[], object]] | None: ...


class Lane(ABC):
    """One resource.

    Attributes:
        name: name of the lane, which appears in thread names.
        failure: the first error of all lanes.
        stream: the stream on which work is enqueued; ``None`` for work on the host.
    """

    def __init__(self, name: str, failure: Failure, stream: torch.cuda.Stream | None = None) -> None:
        self.name, self.failure, self.stream = name, failure, stream

    def _enqueue(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        """Call ``work``, which enqueues on the stream, behind the events of ``after``."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            for before in after:
                if before.event is not None:
                    self.stream.wait_event(before.event)
            self.failure.run(work, failed)
        token.event = _event_behind(self.stream)

    def submit_stage(self, stage: Stage, offset: int, after: Sequence[Token]) -> Token:
        """Queue a stage; never blocks.

        A stage that can start immediately is started by the calling thread, unless it waits for something or a device
        does the work.

        Args:
            stage: the stage.
            offset: added to the seeds of its units in this training step.
            after: tokens of what must be done before.
        """
        work: Work = functools.partial(stage.work, offset)
        if stage.begin is not None and self.stream is None and all(token.done.is_set() for token in after):
            work = self._begun(stage.begin)
        return self.submit(work, after)

    def _begun(self, begin: Callable[[], Callable[[], object]]) -> Work:
        """Begin now; returns work that waits for the end. After a failure nothing is begun."""
        waits: list[Callable[[], object]] = []
        self.failure.run(lambda: waits.append(begin()), None)

        def work() -> None:
            for wait in waits:
                wait()

        return work

    @abstractmethod
    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        """Queue ``work`` behind what the lane has and behind ``after``; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Let queued work finish and release the resource; further calls do nothing."""


class ThreadLane(Lane):
    """A worker thread that runs its work first in, first out.

    Args:
        name: name of the lane.
        failure: the first error of all lanes.
        stream: the stream on which work is enqueued; ``None`` for work on the host.
        put: queues work for a thread that several lanes share; by default the lane has its own thread.
    """

    def __init__(
        self,
        name: str,
        failure: Failure,
        stream: torch.cuda.Stream | None = None,
        put: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__(name, failure, stream)
        self._worker = None if put is not None else Worker(name, failure)
        self._put = put if self._worker is None else self._worker.put
        self._working = threading.Lock()

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        token = Token()
        assert self._put is not None
        self._put(functools.partial(self._run, work, after, failed, token))
        return token

    def _run(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        try:
            self._do(work, after, failed, token)
        except BaseException as error:  # raised by a device
            self.failure.set(error)
            self.failure.run(work, failed)  # calls ``failed``
        token.done.set()

    def _do(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        for before in after:
            before.wait()
        with self._working:
            self.failure.run(work, failed)

    def settle(self) -> None:
        """After a failure, wait for the work in progress; the lane runs nothing further."""
        with self._working:
            pass

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class StreamLane(Lane):
    """A CUDA stream. The submitting thread enqueues work behind the events of ``after``, none of which may be the token
    of a thread."""

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        token = Token()
        self._enqueue(work, after, failed, token)
        token.done.set()
        return token

    def close(self) -> None:
        """Nothing to release: streams belong to a pool."""


class FedStreamLane(ThreadLane):
    """A CUDA stream on which a worker thread enqueues work, first in, first out.

    It is for messages that pass through the host. Work behind a step on the host can be enqueued only when a thread
    has finished that step, and the submitting thread must not wait for it. All lanes of the device are then of this
    kind, so that each stream still gets its work in the order of submission.
    """

    def _do(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        for before in after:
            before.done.wait()
        self._enqueue(work, after, failed, token)


class DeviceLanes:
    """The lanes of one engine: for each phase one to compute, and one per channel to communicate. A lane is made when
    work is submitted to it for the first time.

    The lane of a stage depends on the number of collectives before it, so the first encoding of a message never queues
    behind the second encoding of an earlier one. Messages are submitted one after the other, with all of their stages,
    in the same order on all ranks. Hence, of all unfinished work on all ranks, the first stage of the first message
    waits for nothing, and there is no deadlock. Where rounds reorder collectives, the same is true for the first stage
    of the first round.

    Args:
        device: device of the gradients, which decides the kind of lane.
        offloads: whether there are steps on the host of a device.
    """

    def __init__(self, device: torch.device, offloads: bool = False) -> None:
        self.device = device
        self.failure = Failure()
        self._lanes: dict[tuple[LaneKey, int], Lane] = {}
        self._streams: dict[LaneKey, torch.cuda.Stream] = {}
        feeds = offloads and device.type == "cuda"
        self._feeder = Worker("collectives", self.failure) if feeds else None
        self._rounds = None if self._feeder is None else Rounds(self._feeder.put, MAX_PHASES)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane; nothing runs after it."""
        return self.failure.error

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> Lane:
        """The lane of :func:`~gckernels.sync.programs.lanes.lane_key`."""
        shared = lane_key(resource, phase, channel)
        # a lane that takes turns with others has to know its phase
        key = (shared, phase if self._takes_turns(resource) else shared.phase)
        if key not in self._lanes:
            self._lanes[key] = self._new(shared, phase)
        return self._lanes[key]

    def _new(self, key: LaneKey, phase: int) -> Lane:
        if self.device.type != "cuda" or key.resource.on_host:
            return ThreadLane(key.name, self.failure)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._streams[key]
        if self._rounds is None:
            return StreamLane(key.name, self.failure, stream)
        put = functools.partial(self._rounds.submit, phase) if self._takes_turns(key.resource) else None
        return FedStreamLane(key.name, self.failure, stream, put)

    def _takes_turns(self, resource: Resource) -> bool:
        return self._rounds is not None and resource.does == "communicate" and not resource.on_host

    def next_message(self, last_phase: int) -> None:
        """Begin another message, to which all later submissions belong.

        Args:
            last_phase: number of collectives before its last stage.
        """
        if self._rounds is not None:
            self._rounds.next_message(last_phase)

    def end_step(self) -> None:
        """Say that nothing else is submitted before all submitted work is done."""
        if self._rounds is not None:
            self._rounds.end_step()

    def here(self) -> Token:
        """A token for the work of the calling thread so far; on a device, the work enqueued on the current stream."""
        on_cuda = self.device.type == "cuda"
        token = Token(_event_behind(torch.cuda.current_stream(self.device)) if on_cuda else None)
        token.done.set()
        return token

    def settle(self) -> None:
        """After a failure, wait until no thread computes any more. Collectives may still wait for their timeouts."""
        for (key, _), lane in list(self._lanes.items()):  # another thread may be making one
            if key.resource.does == "compute" and isinstance(lane, ThreadLane):
                lane.settle()

    def close(self) -> None:
        """Wait for all work, including that of a device, and close every lane. After a failure, do not wait: a
        collective on a device may never end."""
        self.end_step()
        for lane in list(self._lanes.values()):
            lane.close()
        if self._feeder is not None:
            self._feeder.close()
        for stream in list(self._streams.values()):
            if self.failure.error is None:
                stream.synchronize()


def _event_behind(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all work on ``stream``. A thread that waits for it sleeps instead of polling."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
