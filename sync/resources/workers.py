"""Tasks, the queues in which they wait for each other, and the threads that run them.

A thread that has finished a task goes on with what waited for it. So a message that is alone wakes one thread, however
many stages it has: a thread that sleeps until a stage before it is done would cost two changes of threads per stage, on
cores and under an interpreter lock that the backward pass needs.

Nothing here waits for a lock. Garbage collection can close lanes in any thread, in the middle of any function.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Work = Callable[[], object]
"""A piece of work for a lane."""
Failed = Callable[[BaseException], object]
"""Called with the first error of all lanes."""

_PATIENCE_S = 0.1  # how long closing waits for a thread after a failure
_EXIT_PATIENCE_S = 1.0  # how long the end of the program waits for threads
_EXIT_POLL_S = 0.001


class Token:
    """The completion of a piece of work.

    Args:
        event: for work on a stream, an event behind it.
        is_done: whether the work is done.

    Attributes:
        is_done: whether the work is done; for work on a stream, whether it is enqueued.
        event: for work on a stream, an event behind it, available once ``is_done``.
        followers: called when the work is done. Each returns a task that its caller must run, or ``None``.
    """

    __slots__ = ("event", "followers", "is_done")

    def __init__(self, event: torch.Event | None = None, is_done: bool = False) -> None:
        self.event, self.is_done = event, is_done
        self.followers: list[Callable[[], Task | None]] = []

    def end(self) -> None:
        """Declare that the work is done, which no queue has run, and wake threads for what has waited for it."""
        self.is_done = True
        for take in self.followers:
            task = take()
            if task is not None:
                task.queue.pool.start(task)

    def join(self, timeout_s: float | None = None) -> bool:
        """Block until ``is_done``, at most for ``timeout_s`` seconds, and return it."""
        if not self.is_done:
            ended = threading.Event()
            self.followers.append(ended.set)
            if not self.is_done:  # otherwise nobody may call the follower
                ended.wait(timeout_s)
        return self.is_done

    def wait(self) -> None:
        """Block until the work is done, also on a device. The calling thread sleeps meanwhile."""
        self.join()
        if self.event is not None:
            self.event.synchronize()


class Task(Token):
    """A piece of work in a queue, and the token of its completion.

    Args:
        execute: runs the task, and never raises.
        after: tokens of the work that must be done before.
        failed: called with the first error, if there is one, instead of or after ``work``.
    """

    __slots__ = ("after", "execute", "failed", "queue", "work")

    def __init__(
        self,
        queue: Queue,
        execute: Callable[[Task], None],
        work: Work,
        after: Sequence[Token],
        failed: Failed | None,
    ) -> None:
        super().__init__()
        self.queue, self.execute = queue, execute
        self.work, self.after, self.failed = work, after, failed

    def is_ready(self) -> bool:
        """Whether everything before is done."""
        for before in self.after:  # noqa: SIM110 (a generator would take three times as long)
            if not before.is_done:
                return False
        return True

    def run(self) -> None:
        """Run the task, and let go of all that it needed."""
        self.execute(self)
        self.work, self.after, self.failed = _nothing, (), None
        self.is_done = True


def _nothing(*_: object) -> None:
    """Replaces the work of a finished task, so that its tensors are freed."""


def _leave(task: Task) -> None:
    """Runs for a task whose work was cancelled."""


class LaneFailure:
    """The first error of a set of lanes.

    Attributes:
        error: the error; ``None`` if there is none.
        tell: called with the error and the stage that it is of, if that is known. It must not wait.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.tell: Callable[[BaseException, Any], object] = _nothing
        self._lock = threading.Lock()

    def set(self, error: BaseException, stage: Any = None) -> None:
        """Keep ``error``, of ``stage`` if that is known, unless there is one already."""
        with self._lock:
            if self.error is None:
                self._keep(error, stage)

    def explain(self, error: BaseException) -> None:
        """Keep ``error`` instead of one there may be already, which has come of it."""
        with self._lock:
            self._keep(error, None)

    def _keep(self, error: BaseException, stage: Any) -> None:
        with suppress(Exception):
            self.tell(error, stage)
        self.error = error

    def watch(self, stage: Any, call: Callable[[], T]) -> T:
        """The result of ``call``, whose errors are those of ``stage``."""
        try:
            return call()
        except BaseException as error:
            self.set(error, stage)
            raise

    def run(self, work: Work, failed: Failed | None) -> None:
        """Call ``work`` unless there is an error already.

        If there is one, or ``work`` raises, ``failed`` is called with the first error.
        """
        if self.error is None:
            try:
                work()
                return
            except BaseException as error:  # errors of all kinds, because others wait for the work
                self.set(error)
        if failed is not None and self.error is not None:
            with suppress(Exception):  # the lane must go on, to report to others
                failed(self.error)


class Queue:
    """Tasks that run one after the other, in the order of submission.

    The first task runs as soon as everything before it is done. The others wait for it even if they are ready.

    Args:
        pool: its threads run the tasks.
        keeps_thread: whether the next task comes first for a thread that could also go on with something else. It does
            where tasks use a link, which would be idle until another thread is awake.
    """

    def __init__(self, pool: Pool, keeps_thread: bool = False) -> None:
        self.pool, self.keeps_thread = pool, keeps_thread
        self._tasks: deque[Task] = deque()
        self._running: Task | None = None
        self._taken = threading.Lock()  # whoever has it runs the first task; nobody waits for it

    def put(self, task: Task) -> None:
        """Queue ``task``; never blocks."""
        self._tasks.append(task)
        for before in task.after:
            if not before.is_done:
                before.followers.append(self.take)
        if task.is_ready():  # if it becomes so only now, what it follows takes it
            first = self.take()
            if first is not None:
                self.pool.start(first)

    def take(self) -> Task | None:
        """The first task, if it may run now, which the caller must run.

        ``None`` if there is none, it must wait, or a task of this queue is running. In the last case the thread that
        runs it will take the next one.
        """
        while self._taken.acquire(blocking=False):
            if self._first_is_ready():
                self._running = self._tasks.popleft()
                return self._running
            self._taken.release()
            if not self._first_is_ready():  # otherwise others may have found the queue taken just now
                break
        return None

    def _first_is_ready(self) -> bool:
        try:
            return self._tasks[0].is_ready()
        except IndexError:
            return False

    def release(self) -> Task | None:
        """End the task that runs, which is done, and take the next one."""
        self._running = None
        self._taken.release()
        return self.take()

    def last(self) -> Token:
        """The completion of all that has been put so far."""
        if not self._tasks and not self._taken.locked():
            return Token(is_done=True)
        task = Task(self, _leave, _nothing, (), None)
        self.put(task)
        return task

    def settle(self) -> None:
        """After a failure, wait for the task that runs; no work of another one will."""
        running = self._running
        if running is not None:
            running.join()


class Pool:
    """Threads that run the tasks of some queues. There are never more threads than queues.

    Args:
        name: part of the names of the threads.
        failure: the failure of all lanes. After one, :meth:`close` does not wait for threads that run something.
    """

    def __init__(self, name: str, failure: LaneFailure) -> None:
        self._name, self._failure = name, failure
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._is_closed = False
        _pools.add(self)

    def start(self, task: Task) -> None:
        """Run a task that has been taken from its queue; never blocks. The thread that slept last is woken first."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self, f"gckernels-{self._name}-{len(self._workers)}")
            self._workers.append(worker)
            worker.start()
        worker.inbox.put(task)

    def rest(self, worker: _Worker) -> None:
        """Take ``worker``, which will run what is put into its inbox, as idle."""
        self._idle.append(worker)
        if self._is_closed:
            self._end_idle()

    def _end_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().inbox.put(None)

    def close(self) -> None:
        """End the threads when they have nothing to run; further calls do nothing."""
        self._is_closed = True
        self._end_idle()
        for worker in list(self._workers):
            if worker is not threading.current_thread():
                # after a failure the thread may be in a collective that waits for its timeout
                worker.join(timeout=None if self._failure.error is None else _PATIENCE_S)

    @property
    def is_busy(self) -> bool:
        """Whether a thread runs something."""
        return any(worker.is_alive() and worker not in self._idle for worker in list(self._workers))

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return threading.current_thread() in self._workers


class _Worker(threading.Thread):
    """A thread of a pool.

    Attributes:
        inbox: the tasks to run; ``None`` ends the thread.
    """

    def __init__(self, pool: Pool, name: str) -> None:
        # a daemon: a thread stuck in a collective must not keep a failed process alive
        super().__init__(name=name, daemon=True)
        self._pool = pool
        self.inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (task := self.inbox.get()) is not None:
            following: Task | None = task
            del task
            while following is not None:
                following = self._run(following)

    def _run(self, task: Task) -> Task | None:
        """Run a task and return one to run next, which has waited for it; wake other threads for the rest."""
        task.run()
        chosen = None
        for take in task.followers:
            follower = take()
            if follower is None:
                continue
            if chosen is None and follower.queue.pool is self._pool:
                chosen = follower
            else:
                follower.queue.pool.start(follower)
        if chosen is None:
            self._pool.rest(self)  # before the queue is free, or its next task might start another thread
        behind = task.queue.release()
        if behind is not None:
            if chosen is not None and task.queue.keeps_thread:
                chosen, behind = behind, chosen
            self._pool.start(behind)
        return chosen


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _rest_before_exit() -> None:
    """Wait until no thread of any pool runs anything, but not for one that is stuck.

    Before Python 3.14, a daemon thread that asks for the interpreter lock when the interpreter has ended is unwound.
    Inside torch, whose destructors ask for it, that aborts the process.
    """
    deadline_s = time.monotonic() + _EXIT_PATIENCE_S
    while any(pool.is_busy for pool in list(_pools)) and time.monotonic() < deadline_s:
        time.sleep(_EXIT_POLL_S)
