"""Worker threads, the tokens by which they wait for each other, and their first error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

Work = Callable[[], None]
Failed = Callable[[BaseException], object]


class Token:
    """Work that will be done.

    Attributes:
        done: set when the work is done; for a stream, when all of it has been enqueued.
        event: for a stream, an event behind the work, once ``done`` is set.
    """

    __slots__ = ("done", "event")

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event
        self.done = threading.Event()

    def wait(self) -> None:
        """Block the calling thread until the work is done, including that of a device. The thread sleeps meanwhile."""
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
        """Call ``work``; if it raises, or there was an error before, call ``failed`` with the first error."""
        if self.error is None:
            try:
                return work()
            except BaseException as error:  # any kind of error: everybody who waits must learn of it
                self.set(error)
        if failed is not None and self.error is not None:
            with suppress(Exception):  # the lane must go on: other callbacks have to be called
                failed(self.error)


class Worker:
    """A thread that runs its work first in, first out.

    Args:
        name: name of the thread.
        failure: the first error of all lanes. After an error, closing waits for the thread for a second at most.
    """

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure = failure
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        # a daemon: a thread stuck in a collective must not keep a failed process alive
        self._thread = threading.Thread(target=self._run, name=f"gckernels-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Queue ``work``, which must not raise."""
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # hold no tensors while waiting for more

    def close(self) -> None:
        """Run all queued work and end the thread; further calls do nothing."""
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._queue.put(None)
        # after a failure a collective may still be waiting for its timeout: leave the daemon to it
        self._thread.join(timeout=None if self._failure.error is None else 1.0)
