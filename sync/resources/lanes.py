"""Lanes: resources that do one thing at a time, in the order of submission.

A step of a unit is submitted to its lane together with the *tokens* of what must be done before it, and gives a token
itself. Submission never blocks. Three kinds of lane run the same submissions:

- :class:`ThreadLane` is a worker thread; a token is set when the work is done. For CPU tensors and Gloo, whose
  collectives block the thread that calls them (and must never be called from a future's callback).
- :class:`StreamLane` is a CUDA stream; the work is enqueued at once by the submitting thread and a token is an event.
  Nothing ever waits on the host.
- :class:`FedStreamLane` is both: a worker thread that enqueues on a stream, for programs with steps on the host of a
  device. The streams of collectives are fed by one thread, in the order of :mod:`~gckernels.sync.resources.rounds`.

Once something has failed, nothing that is submitted to the same :class:`Lanes` runs any more: a collective after a
failed one would only wait for its timeout. What was submitted with ``failed`` is told the first error instead.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..programs.stages import Resource
from .rounds import Rounds
from .workers import Failed, Failure, Token, Work, Worker

MOST_PHASES = 8
"""Communicators and lanes that the phases of a program have; those of a ring of more ranks take turns."""


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


class Lanes:
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
        self._lanes: dict[tuple[Resource, int, int], Lane] = {}
        self._streams: dict[tuple[Resource, int, int], torch.cuda.Stream] = {}
        feeds = offloads and device.type == "cuda"
        self._feeder = Worker("collectives", self.failure) if feeds else None
        self._rounds = None if self._feeder is None else Rounds(self._feeder.put, MOST_PHASES)

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> Lane:
        """The one of a phase and, where it communicates, a channel. From :data:`MOST_PHASES` on phases share lanes."""
        has_channels = resource in (Resource.COMMUNICATE, Resource.HOST_COMMUNICATE)
        shared = (resource, phase % MOST_PHASES, channel if has_channels else 0)
        # what takes turns has to know which phase it is
        key = (resource, phase, shared[2]) if self._takes_turns(resource) else shared
        if key not in self._lanes:
            name = f"{resource.value}-{shared[1]}" + (f"-{channel}" if has_channels else "")
            self._lanes[key] = self._new(name, resource, phase, shared)
        return self._lanes[key]

    def _new(self, name: str, resource: Resource, phase: int, shared: tuple[Resource, int, int]) -> Lane:
        if self.device.type != "cuda" or resource.on_host:
            return ThreadLane(name, self.failure)
        if shared not in self._streams:
            self._streams[shared] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._streams[shared]
        if self._rounds is None:
            return StreamLane(name, self.failure, stream)
        put = functools.partial(self._rounds.submit, phase) if self._takes_turns(resource) else None
        return FedStreamLane(name, self.failure, stream, put)

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
        for (resource, *_), lane in list(self._lanes.items()):  # another thread may be making one
            if resource.does == "compute" and isinstance(lane, ThreadLane):
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
