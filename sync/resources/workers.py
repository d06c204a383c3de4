"""Worker threads, tokens with which they wait for each other, and their first error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

Work = Callable[[], None]
"""A piece of work for a lane or a worker."""
Failed = Callable[[BaseException], object]
"""Called with the first error."""


class Token:
    """The completion of a piece of work.

    Attributes:
        done: set when the work is done; for work on a stream, when it is enqueued.
        event: for work on a stream, an event behind it, available once ``done`` is set.
    """

    __slots__ = ("done", "event")

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event
        self.done = threading.Event()

    def wait(self) -> None:
        """Block until the work is done, also on a device. The calling thread sleeps meanwhile."""
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
        """Run ``work`` unless there is an error already.

        If there is one, or ``work`` raises, ``failed`` is called with the first error.
        """
        if self.error is None:
            try:
                return work()
            except BaseException as error:  # errors of all kinds, because others wait for the work
                self.set(error)
        if failed is not None and self.error is not None:
            with suppress(Exception):  # the lane must go on, to report to others
                failed(self.error)


class Worker:
    """A thread that runs its work in the order in which it is queued.

    Args:
        name: suffix of the thread's name.
        failure: the failure of all lanes. After one, :meth:`close` waits at most one second for the thread.
    """

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure = failure
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        # a daemon: a thread stuck in a collective must not keep a failed process alive
        self._thread = threading.Thread(target=self._run, name=f"gckernels-{name}", daemon=True)
        self._has_begun = False

    def put(self, work: Work) -> None:
        """Queue ``work``, which must not raise. The first call starts the thread."""
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # hold no tensors while waiting for more

    def close(self) -> None:
        """Run the queued work and end the thread; further calls do nothing."""
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._queue.put(None)
        # after a failure the daemon may be in a collective that waits for its timeout
        self._thread.join(timeout=None if self._failure.error is None else 1.0)
