"""Long work in slices, between the steps of a training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Abandoned(BaseException):
    """Raised in work that nobody waits for any more."""


class Slices(Generic[T]):
    """Work in a thread of its own, which only runs while its owner waits for it.

    The work must call :meth:`rest` often. So a training does not wait for all of it at once, and does not share its
    interpreter with it either.

    Args:
        work: the work; it is given :meth:`rest`.
        clock: returns seconds.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._clock = work, clock
        self._turn = threading.Condition()
        self._runs, self._is_abandoned = False, False
        self._until_s = 0.0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.done = False

    def go_on(self, seconds: float) -> bool:
        """Let the work go on for some seconds, or to its end, and return whether it has ended.

        Args:
            seconds: how long; it may take as much longer as the work takes from one rest to the next.
        """
        with self._turn:
            self._until_s, self._runs = self._clock() + seconds, True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="gckernels-planning", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many
                    self._error, self.done = error, True
                    return True
                self._thread = thread
            self._turn.notify_all()
            self._turn.wait_for(lambda: self.done or not self._runs)
        if self.done:
            self._thread.join()
        return self.done

    def result(self) -> T:
        """The result of the work. An exception of the work is raised here."""
        assert self.done
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def close(self) -> None:
        """End the work; without effect if it has ended."""
        if self._thread is None or self.done:
            return
        with self._turn:
            self._is_abandoned = self._runs = True
            self._turn.notify_all()
        self._thread.join()

    def rest(self) -> None:
        """Wait for the next slice if this one is over. The work calls it."""
        if self._clock() < self._until_s and not self._is_abandoned:
            return
        with self._turn:
            if not self._is_abandoned:
                self._runs = False
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._runs)
            if self._is_abandoned:
                raise Abandoned

    def _run(self) -> None:
        try:
            self._result = self._work(self.rest)
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        with self._turn:
            self.done = True
            self._turn.notify_all()
