"""The backward passes of a process: when the outermost one has ended, and whether one has failed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

NO_TASK = -1
"""The number of the graph task where no backward runs."""


class Passes:
    """Calls a function at the end of each outermost backward in which gradients have come.

    Reentrant checkpoints run backwards inside of backwards, each a graph task of its own with a larger number than the
    one around it. Autograd tells of the end of a task only in that task. So when an inner one has ended, the node that
    has run it is asked for the nodes behind it, at which the outer task comes by.

    The function is not called if a backward raises: autograd drops what was to be called at the end, or the graph with
    the hooks of its nodes.

    Args:
        ended: the function.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._seen: set[int] = set()  # the graph tasks in which gradients have come
        self._ends: dict[int, Callable[[], _End | None]] = {}  # still to be called, by task, which keeps them

    @property
    def have_failed(self) -> bool:
        """Whether a backward in which gradients have come is gone without having ended."""
        # outside of all backwards none can end any more; the thread of a device may not have dropped a failed one yet
        is_outside = torch._C._current_graph_task_id() == NO_TASK
        return any(is_outside or end() is None for end in self._ends.values())

    def see(self) -> bool:
        """Note that a gradient has come in the backward that runs now. Return whether one before it has failed."""
        if (task := torch._C._current_graph_task_id()) in self._seen:
            return False
        has_failed, end = self.have_failed, _End(weakref.ref(self), task)
        self._seen.add(task)
        self._ends[task] = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        return has_failed

    def forget(self) -> None:
        """Call nothing at the end of the backward that runs now."""
        self._seen, self._ends = set(), {}

    def _end(self, end: _End) -> None:
        """Note the end of a task, in whose callbacks the current node is one of the task around it."""
        if not self._waits_for(end):
            return
        if (node := torch._C._current_autograd_node()) is not None:
            end.wait_behind(node)
            return
        del self._ends[end.task]
        # a task with a lower number has begun before this one, and cannot be inside of it
        failed = {task: _gone for task, other in self._ends.items() if task < end.task or other() is None}
        self.forget()
        self._ends |= failed
        self._ended()

    def _go_on(self, end: _End) -> None:
        """Note that the task around an ended one goes on."""
        if not self._waits_for(end):
            return
        del self._ends[end.task]
        self.see()
        if torch._C._current_graph_task_id() > end.task:  # another backward, of a graph that was kept
            self._ends[end.task] = _gone

    def _waits_for(self, end: _End) -> bool:
        return end.task in self._ends and self._ends[end.task]() is end


class _End:
    """A function that is called at the end of a graph task. It lives as long as that, unless it has been called.

    Args:
        passes: the passes.
        task: the number of the task.
    """

    def __init__(self, passes: weakref.ref[Passes], task: int) -> None:
        self.task, self._passes = task, passes
        self._handles: list[RemovableHandle] = []

    def __call__(self) -> None:
        if (passes := self._passes()) is not None:
            passes._end(self)

    def wait_behind(self, node: Any) -> None:
        """Be called when the task around this one comes to one of the nodes behind ``node``, which it runs now."""
        nodes = [each for each, _ in node.next_functions if each is not None]
        self._handles = [each.register_prehook(self._go_on) for each in nodes]

    def _go_on(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if (passes := self._passes()) is not None:
            passes._go_on(self)


def _gone() -> None:
    """A reference to an end that is gone."""
