"""Lanes: resources that do one thing at a time, in the order of submission.

A step of a unit is submitted to its lane together with the *tokens* of what must be done before it, and gives a token
itself. Submission never blocks. Two kinds of lane run the same submissions:

- :class:`ThreadLane` is a worker thread; a token is set when the work is done. For CPU tensors and Gloo, whose
  collectives block the thread that calls them (and must never be called from a future's callback).
- :class:`StreamLane` is a CUDA stream; the work is enqueued at once by the submitting thread and a token is an event.
  Nothing ever waits on the host.

Once something has failed, nothing that is submitted to the same :class:`Lanes` runs any more: a collective after a
failed one would only wait for its timeout. What was submitted with ``failed`` is told the first error instead.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

Work = Callable[[], None]
Failed = Callable[[BaseException], object]


class Token:
    """Something that will be done: ``done`` is set by worker threads, ``event`` recorded by streams."""

    __slots__ = ("done", "event")

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event
        self.done = threading.Event()


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
    """One resource. ``name`` appears in thread names."""

    def __init__(self, name: str, failure: Failure) -> None:
        self.name = name
        self.failure = failure

    @abstractmethod
    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        """Queue ``work`` behind what the lane has and behind ``after``; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Let queued work finish and release the resource; further calls do nothing."""


class ThreadLane(Lane):
    """A worker thread that runs what it is given, first in, first out."""

    def __init__(self, name: str, failure: Failure) -> None:
        super().__init__(name, failure)
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Token], Failed | None, Token] | None]
        self._queue = queue.SimpleQueue()
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
            for before in after:
                before.done.wait()
            self.failure.run(work, failed)
            token.done.set()
            del item, work, after, failed, token  # hold no tensors while waiting for more

    def close(self) -> None:
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._queue.put(None)
        # after a failure a collective may still be waiting for its timeout: leave the daemon to it
        self._thread.join(timeout=None if self.failure.error is None else 1.0)


class StreamLane(Lane):
    """A CUDA stream. Work is enqueued by the submitting thread, in order, behind the events of ``after``."""

    def __init__(self, name: str, failure: Failure, device: torch.device) -> None:
        super().__init__(name, failure)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Work, after: Sequence[Token] = (), failed: Failed | None = None) -> Token:
        with torch.cuda.stream(self.stream):
            for before in after:
                if before.event is not None:
                    self.stream.wait_event(before.event)
            self.failure.run(work, failed)
        token = Token(self.stream.record_event())
        token.done.set()
        return token

    def close(self) -> None:
        """Nothing to release: streams belong to a pool, and what they hold finishes by itself."""


class Lanes:
    """The lanes of one engine: compute and communicate in turn, ``compute[p]`` before ``communicate[p][channel]``.

    A step's lane is told by how many collectives of its program come before it. So a lane only ever waits for lanes
    to its left, and the first encoding of a unit never queues behind the second one of the unit before it.

    Args:
        device: of the tensors; decides the kind of lane.
        phases: number of collectives in the longest program.
        channels: collectives of a phase that can be on their way at the same time.
    """

    def __init__(self, device: torch.device, phases: int, channels: int = 1) -> None:
        self.device = device
        self.failure = Failure()
        self.compute = tuple(self._lane(f"compute-{phase}") for phase in range(phases + 1))
        self.communicate = tuple(
            tuple(self._lane(f"communicate-{phase}-{channel}") for channel in range(channels))
            for phase in range(phases)
        )

    def _lane(self, name: str) -> Lane:
        if self.device.type == "cuda":
            return StreamLane(name, self.failure, self.device)
        return ThreadLane(name, self.failure)

    def here(self) -> Token:
        """A token for what the calling thread has done so far (on a device: enqueued on the current stream)."""
        token = Token(torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None)
        token.done.set()
        return token

    def close(self) -> None:
        """Close every lane."""
        for lane in (*self.compute, *(lane for channels in self.communicate for lane in channels)):
            lane.close()
