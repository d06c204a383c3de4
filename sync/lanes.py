"""Lanes: resources that do one thing at a time, in the order of submission.

A step of a unit is submitted to its lane together with the *tokens* of what must be done before it, and gives a token
itself. Submission never blocks. Three kinds of lane run the same submissions:

- :class:`ThreadLane` is a worker thread; a token is set when the work is done. For CPU tensors and Gloo, whose
  collectives block the thread that calls them (and must never be called from a future's callback).
- :class:`StreamLane` is a CUDA stream; the work is enqueued at once by the submitting thread and a token is an event.
  Nothing ever waits on the host.
- :class:`FedStreamLane` is both: a worker thread that enqueues on a stream, for programs with steps on the host of a
  device.

Once something has failed, nothing that is submitted to the same :class:`Lanes` runs any more: a collective after a
failed one would only wait for its timeout. What was submitted with ``failed`` is told the first error instead.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum

import torch

Work = Callable[[], None]
Failed = Callable[[BaseException], object]


class Resource(Enum):
    """What a lane is one of; in the order in which a message may need them between two collectives."""

    COMPUTE = "compute"
    TO_HOST = "to-host"
    HOST_COMPUTE = "host-compute"
    TO_DEVICE = "to-device"
    AVERAGE = "average"  # in place, without compression
    COMMUNICATE = "communicate"
    HOST_COMMUNICATE = "host-communicate"

    @property
    def on_host(self) -> bool:
        """It is the processor that works; everything else is done by the device."""
        return self in (Resource.HOST_COMPUTE, Resource.HOST_COMMUNICATE)

    @property
    def does(self) -> str:
        """``"compute"``, ``"copy"`` or ``"communicate"``."""
        match self:
            case Resource.COMPUTE | Resource.HOST_COMPUTE:
                return "compute"
            case Resource.TO_HOST | Resource.TO_DEVICE:
                return "copy"
        return "communicate"


class Token:
    """Something that will be done.

    Attributes:
        done: set by worker threads when it is; for streams, when all of it has been enqueued.
        event: of a stream: recorded behind it, once ``done`` is set.
    """

    __slots__ = ("done", "event")

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event
        self.done = threading.Event()

    def wait(self) -> None:
        """Block the calling thread until it is done, by a device, too."""
        self.done.wait()
        if self.event is not None:
            self.event.synchronize()


class Failure:
    """The first error of a set of lanes."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> None:
        """Keep ``error`` unless there is one already."""
        with self._lock:
            if self.error is None:
                self.error = error

    def run(self, work: Work, failed: Failed | None) -> None:
        """Do ``work``, or tell ``failed`` the first error, that of ``work`` itself included."""
        if self.error is None:
            try:
                return work()
            except BaseException as error:  # whatever it was, those who wait must learn of it
                self.set(error)
        if failed is not None and self.error is not None:
            with suppress(Exception):  # the lane must live on: others have to be told
                failed(self.error)


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
        token.event = self.stream.record_event()

    @abstractmethod
    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        """Queue ``work`` behind what the lane has and behind ``after``; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Let queued work finish and release the resource; further calls do nothing."""


class ThreadLane(Lane):
    """A worker thread that runs what it is given, first in, first out."""

    def __init__(self, name: str, failure: Failure, stream: torch.cuda.Stream | None = None) -> None:
        super().__init__(name, failure, stream)
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Token], Failed | None, Token] | None]
        self._queue = queue.SimpleQueue()
        self._working = threading.Lock()
        # a daemon: a thread stuck in a collective must not keep a failed process alive
        self._thread = threading.Thread(target=self._run, name=f"gckernels-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        token = Token()
        self._queue.put((work, after, failed, token))
        return token

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, failed, token = item
            try:
                self._do(work, after, failed, token)
            except BaseException as error:  # of a device
                self.failure.set(error)
                self.failure.run(work, failed)  # tells it
            token.done.set()
            del item, work, after, failed, token  # hold no tensors while waiting for more

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
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._queue.put(None)
        # after a failure a collective may still be waiting for its timeout: leave the daemon to it
        self._thread.join(timeout=None if self.failure.error is None else 1.0)


class StreamLane(Lane):
    """A CUDA stream. Work is enqueued by the submitting thread, in order, behind the events of ``after``, of which none
    may be a thread's."""

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        token = Token()
        self._enqueue(work, after, failed, token)
        token.done.set()
        return token

    def close(self) -> None:
        """Nothing to release: streams belong to a pool, and what they hold finishes by itself."""


class FedStreamLane(ThreadLane):
    """A CUDA stream on which a worker thread enqueues what it is given, first in, first out.

    For messages that go through the host: what follows there can be enqueued only when a thread has finished, and the
    thread that submits must not wait for it. All lanes of the device are of this kind then, so that streams get their
    work in the order of submission still.
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
    waits for nothing, and no two can wait for each other.

    Args:
        device: of the gradients; decides the kind of lane.
        offloads: there are steps on the host of a device.
    """

    def __init__(self, device: torch.device, offloads: bool = False) -> None:
        self.device, self._offloads = device, offloads
        self.failure = Failure()
        self._lanes: dict[tuple[Resource, int, int], Lane] = {}

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> Lane:
        """The one of a phase and, where it communicates, a channel."""
        has_channels = resource in (Resource.COMMUNICATE, Resource.HOST_COMMUNICATE)
        key = (resource, phase, channel if has_channels else 0)
        if key not in self._lanes:
            name = f"{resource.value}-{phase}" + (f"-{channel}" if has_channels else "")
            self._lanes[key] = self._new(name, on_host=resource.on_host)
        return self._lanes[key]

    def _new(self, name: str, on_host: bool) -> Lane:
        if self.device.type != "cuda" or on_host:
            return ThreadLane(name, self.failure)
        kind = FedStreamLane if self._offloads else StreamLane
        return kind(name, self.failure, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def here(self) -> Token:
        """A token for what the calling thread has done so far (on a device: enqueued on the current stream)."""
        token = Token(torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None)
        token.done.set()
        return token

    def settle(self) -> None:
        """After a failure: wait until no thread computes any more. Collectives may be waiting for their timeouts."""
        for (resource, *_), lane in list(self._lanes.items()):  # another thread may be making one
            if resource.does == "compute" and isinstance(lane, ThreadLane):
                lane.settle()

    def close(self) -> None:
        """Close every lane."""
        for lane in list(self._lanes.values()):
            lane.close()
