"""The threads of the host path: their number, and running the parts of a call on them.

The default is torch's number of intra-op threads, so that one setting (``OMP_NUM_THREADS``, ``torch.set_num_threads``,
torchrun's) applies to both. The threads are kept from call to call and sleep between calls: they never spin, and take
no core from a backward pass that runs meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

PARTS_PER_THREAD = 4  # more let fast threads take over more from slow ones, but every part costs a call
_num_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads of the host path, the calling one included; ``None`` for the number that torch has.

    Results do not depend on it.

    Raises:
        ValueError: not a positive integer.
    """
    global _num_threads
    if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
        raise ValueError(f"set_num_threads: num_threads must be a positive integer or None, got {num_threads!r}")
    _num_threads = num_threads


def get_num_threads() -> int:
    """The number of threads that the host path uses for a large tensor."""
    return torch.get_num_threads() if _num_threads is None else _num_threads


def run_parts(work: Callable[[int, int], object], count: int, min_part: int) -> None:
    """Call ``work(start, stop)`` for consecutive parts of ``range(count)``, on several threads.

    Returns when all parts are done. ``work`` must release the interpreter's lock, or nothing is gained.

    Args:
        work: the function.
        count: length of the range.
        min_part: smallest length of a part that is worth another thread.
    """
    threads = max(1, min(get_num_threads(), count // max(min_part, 1)))
    if threads == 1:
        work(0, count)
        return
    # There are more parts than threads, and every thread that is free takes one. A thread that starts late, because its
    # core or the pool is busy, leaves its parts to the others: the calling thread waits only for parts that were begun.
    number = max(threads, min(PARTS_PER_THREAD * threads, count // max(min_part, 1)))
    parts = [(count * part // number, count * (part + 1) // number) for part in reversed(range(number))]

    def help_out() -> None:
        while parts:
            try:
                part = parts.pop()
            except IndexError:  # another thread was faster
                return
            work(*part)

    helpers: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        for _ in range(threads - 1):
            helpers.append(_threads().submit(help_out))
    try:
        help_out()
    finally:
        parts.clear()
        started = [helper for helper in helpers if not helper.cancel()]
        wait(started)  # all of them, even if one fails: they work on the caller's memory
    for helper in started:
        helper.result()


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="gckernels-host")
        return _pool


def _forget() -> None:
    """Forget the pool in a forked child, where its threads do not run."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
