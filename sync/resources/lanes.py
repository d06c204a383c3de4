"""Lanes: resources that do one thing at a time, in the order of submission.

A step of a unit is submitted to its lane together with the *tokens* of what must be done before it, and gives a token
itself. Submission never blocks. Three kinds of lane run the same submissions:

- :class:`ThreadLane` is a worker thread; a token is set when the work is done. For CPU tensors and Gloo, whose
  collectives block the thread that calls them (and must never be called from a future's callback).
- :class:`StreamLane` is a CUDA stream; the work is enqueued at once by the submitting thread and a token is an event.
  Nothing ever waits on the host.
- :class:`FedStreamLane` is both: a worker thread that enqueues on a stream, for programs with steps on the host of a
  device. The streams of collectives are fed by one thread, in the order of :mod:`~gckernels.sync.resources.rounds`.

Once something has failed, nothing that is submitted to the same :class:`DeviceLanes` runs any more: a collective after
a failed one would only wait for its timeout. What was submitted with ``failed`` is told the first error instead.
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
        spec: what it does.
        work: does it, given the number that is added to seeds.
        begin: if it can start at once: starts it in the calling thread, and returns a function that waits for its end.
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
        name: appears in thread names.
        failure: of all lanes.
        stream: what work is enqueued on, where it is a device that does it.
    """

    def __init__(self, name: str, failure: Failure, stream: torch.cuda.Stream | None = None) -> None:
        self.name, self.failure, self.stream = name, failure, stream

    def _enqueue(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        """Do ``work``, which enqueues, on the stream behind the events of ``after``."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            for before in after:
                if before.event is not None:
                    self.stream.wait_event(before.event)
            self.failure.run(work, failed)
        token.event = _event_behind(self.stream)

    def submit_stage(self, stage: Stage, offset: int, after: Sequence[Token]) -> Token:
        """Queue a stage; never blocks. One that may start at once, and waits for nothing, is started by the calling
        thread, unless a device does the work.

        Args:
            stage: what to do.
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
    """A worker thread that runs what it is given, first in, first out.

    Args:
        name: of the lane.
        failure: of all lanes.
        stream: what work is enqueued on, where it is a device that does it.
        put: queues what a thread shall do, in an order of its own; by default the lane has a thread for itself.
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
        except BaseException as error:  # of a device
            self.failure.set(error)
            self.failure.run(work, failed)  # tells it
        token.done.set()

    def _do(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        for before in after:
            before.wait()
        with self._working:
            self.failure.run(work, failed)

    def settle(self) -> None:
        """After a failure: wait until what the thread was doing then has ended. It does nothing any more."""
        with self._working:
            pass

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class StreamLane(Lane):
    """A CUDA stream. Work is enqueued by the submitting thread, in order, behind the events of ``after``, of which none
    may be a thread's."""

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        token = Token()
        self._enqueue(work, after, failed, token)
        token.done.set()
        return token

    def close(self) -> None:
        """Nothing to release: streams belong to a pool."""


class FedStreamLane(ThreadLane):
    """A CUDA stream on which a worker thread enqueues what it is given, first in, first out.

    For messages that go through the host: what follows there can be enqueued only when a thread has finished, and the
    thread that submits must not wait for it. All lanes of the device are of this kind then, so that each stream gets
    its work in the order of submission still.
    """

    def _do(self, work: Work, after: Sequence[Token], failed: Failed | None, token: Token) -> None:
        for before in after:
            before.done.wait()
        self._enqueue(work, after, failed, token)


class DeviceLanes:
    """The lanes of one engine: for each phase one to compute, and others to communicate, one for every channel. Lanes
    are made when something is submitted to them for the first time.

    A step's lane is told by how many collectives of its program come before it, so the first encoding of a unit never
    queues behind the second one of the unit before it. Units are submitted one after the other, with all of their
    steps, in the same order on all ranks; so of all that has not ended, on any rank, the first step of the first unit
    waits for nothing, and no two can wait for each other. Where rounds put collectives into another order, the same
    holds of the first step of the first round.

    Args:
        device: of the gradients; decides the kind of lane.
        offloads: there are steps on the host of a device.
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
        # what takes turns has to know which phase it is
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
        """Begin another message, whose last work is of ``last_phase``: all that is submitted from now on is its own."""
        if self._rounds is not None:
            self._rounds.next_message(last_phase)

    def end_step(self) -> None:
        """Nothing else is submitted before all that was has been done."""
        if self._rounds is not None:
            self._rounds.end_step()

    def here(self) -> Token:
        """A token for what the calling thread has done so far (on a device: enqueued on the current stream)."""
        on_cuda = self.device.type == "cuda"
        token = Token(_event_behind(torch.cuda.current_stream(self.device)) if on_cuda else None)
        token.done.set()
        return token

    def settle(self) -> None:
        """After a failure: wait until no thread computes any more. Collectives may be waiting for their timeouts."""
        for (key, _), lane in list(self._lanes.items()):  # another thread may be making one
            if key.resource.does == "compute" and isinstance(lane, ThreadLane):
                lane.settle()

    def close(self) -> None:
        """Let all work finish, of a device, too, and close every lane. After a failure nothing is waited for: a device
        may be in a collective that does not end."""
        self.end_step()
        for lane in list(self._lanes.values()):
            lane.close()
        if self._feeder is not None:
            self._feeder.close()
        for stream in list(self._streams.values()):
            if self.failure.error is None:
                stream.synchronize()


def _event_behind(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what ``stream`` has. A thread that waits for it sleeps, instead of asking for it all the time."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
