"""The base of front ends of models of FSDP2.

FSDP reduces the gradients of one group of parameters after the other. A front end takes the place of one of FSDP's
collectives: what comes to it is a bucket of the runtime. Everything else of FSDP is as it was.

A plan names whole parameters, so it is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gckernels.codec import GRAD_DTYPES

from ...communication.groups import group_of
from ...engine.bucket_messages import BucketMessages
from ...engine.runtime import Runtime
from ...plans.grouping import PlacedUnit
from ...plans.plan import Plan, UnitPlan
from ...programs.lanes import SHARD_BUFFERS
from ..checks.hooks import weakly
from ..frontend import ModelFrontend
from ..request import Request
from .announcements import Announcements
from .shard_buffers import ShardBuffer
from .shard_groups import Shard, ShardGroup, shard_groups
from .sharded_checks import checked_plan, fitting

_AFTER = -1  # autograd's number of no backward, while FSDP reduces the last groups at its end


@dataclass
class ShardBucket:
    """The gradients of a group on their way.

    Attributes:
        shards: the shards of the group.
        buffer: the memory in which they lie.
        messages: the messages that send it.
    """

    shards: tuple[Shard, ...]
    buffer: torch.Tensor
    messages: BucketMessages


class ShardedFrontend(ModelFrontend):
    """The groups of parameters of a model of FSDP2. Construction is collective."""

    checked_plan = staticmethod(checked_plan)

    @staticmethod
    def averaging(model: torch.nn.Module) -> dist.ProcessGroup:
        """The ranks whose averages are compressed."""
        return shard_groups(model)[0].averaging

    @staticmethod
    def served(model: torch.nn.Module) -> set[str]:
        """The names of the parameters whose gradients FSDP reduces over these ranks: not of those that it ignores."""
        return {name for group in shard_groups(model) for name in group.names}

    @staticmethod
    def groups(model: torch.nn.Module, _: object, /) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if not (found := shard_groups(model)):  # which is refused later
            return ModelFrontend.groups(model, None)
        return found[0].averaging, group_of(found[0].mesh.mesh.flatten().tolist())

    def __init__(self, model: torch.nn.Module, plan: Plan, request: Request) -> None:
        super().__init__(model, plan, request)
        self._model = weakref.ref(model)
        self._groups = shard_groups(model)
        self._backward: int | None = None  # the one that runs, as autograd numbers them
        self._delivers: set[str] = set()  # parameters of which plans have left something behind
        self._row_numels = [sum(group.rows()) for group in self._groups]
        largest = max(self._row_numels, default=0) * self._rows_of_bucket
        self._buffers = [ShardBuffer(largest, self.device) for _ in range(SHARD_BUFFERS)]
        self._used: dict[int, list[bool]] = {}  # which parameters of each group have a gradient
        self._announcements: Announcements | None = None
        self._take(self.new_runtime(plan), {})
        if self.device.type == "cpu" and dist.get_world_size(request.group) > 1:
            try:
                self._announcements = Announcements(request.group, self._groups)
            except BaseException:
                self.runtime.close()
                raise

    def close(self) -> None:
        super().close()
        if self._announcements is not None:
            self._announcements.close()

    def register(self) -> list[torch.nn.Module]:
        model = self._model()
        assert model is not None
        for index, group in enumerate(self._groups):
            self._stand_in(index, group)
            group.before_reductions(functools.partial(weakly(self._look), index))
        return [model]

    def _look(self, index: int) -> None:
        """Note which parameters of a group have a gradient."""
        self._used[index] = self._groups[index].used()

    @abstractmethod
    def _stand_in(self, index: int, group: ShardGroup) -> None:
        """Take the place of what FSDP has for a group."""

    def unregister(self) -> None:
        for group in self._groups:
            group.restore()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for group in self._groups for name, each in group.parameters().items()}

    def deliver_to(self, names: Iterable[str]) -> None:
        self._delivers.update(names)

    @property
    @abstractmethod
    def _rows_of_bucket(self) -> int:
        """The rows of shards that are averaged together."""

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        return fitting(request, self.parameters())

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        known = {  # not those of which parameters have been frozen or thawed since: their shards have other places
            index: each for index, each in self._buckets.items() if each.shards == self._groups[index].shards()
        }
        buckets = {index: self._bound(runtime, index, each.buffer) for index, each in known.items()}
        if runtime.synchronises and not runtime.is_exact:
            for each in (*buckets.values(), *buckets.values()):  # again those whose arena has grown since
                each.messages.now()

        def install() -> None:
            self._take(runtime, buckets)

        return install

    def _take(self, runtime: Runtime, buckets: Mapping[int, ShardBucket]) -> None:
        """Let a runtime execute its plan, with the buckets that are known, by the numbers of their groups."""
        self.runtime, self._buckets = runtime, dict(buckets)

    def _bound(self, runtime: Runtime, index: int, buffer: torch.Tensor) -> ShardBucket:
        """The shards of a group in a buffer, with their messages."""
        units, arena = self._units(runtime, index), runtime.arena(index % SHARD_BUFFERS)
        return ShardBucket(self._groups[index].shards(), buffer, BucketMessages(runtime, buffer, units, arena=arena))

    def _units(self, runtime: Runtime, index: int) -> list[PlacedUnit]:
        """The units of a group with their places in a buffer."""
        return [self._placed(runtime.plan.by_key[shard.name], shard) for shard in self._groups[index].shards()]

    @abstractmethod
    def _placed(self, plan: UnitPlan, shard: Shard) -> PlacedUnit:
        """The plan of a unit with its place in a buffer."""

    def _bucket(self, index: int, buffer: torch.Tensor) -> ShardBucket:
        """The shards of a group, which lie in a buffer now."""
        bucket, shards = self._buckets.get(index), self._groups[index].shards()
        if bucket is None or bucket.shards != shards or bucket.buffer.dtype != buffer.dtype:
            bucket = self._buckets[index] = self._bound(self.runtime, index, buffer)
        return bucket

    # ---------------------------------------------------------------- steps

    def _begun(self, index: int) -> Runtime:
        """The runtime, in the step of the backward that runs, before a group is reduced.

        A group that is used twice is reduced twice, perhaps with fewer gradients, and FSDP adds the second result to
        the first. So the first one arrives here.

        Args:
            index: the number of the group.

        Raises:
            RuntimeError: nothing can be sent any more.
        """
        runtime, task = self.runtime, torch._C._current_graph_task_id()
        if (problem := runtime.problem) is not None:
            raise problem
        if self._backward is None or task not in (self._backward, _AFTER):  # an earlier one may have been given up
            self._backward = task
            runtime.unused.begin()
            runtime.begin_step()
            Variable._execution_engine.queue_callback(weakly(self._end_backward))
        self._buffer_of(index).settle()
        return runtime

    def _fits(self, index: int, numel: int, dtype: torch.dtype) -> bool:
        """Whether compressors take the gradients of a group, and all of its parameters that are not frozen have one.

        Args:
            index: the number of the group.
            numel: the elements of the vector that FSDP reduces.
            dtype: its dtype.
        """
        rows = sum(shard.row for shard in self._groups[index].shards())
        return dtype in GRAD_DTYPES and numel == self._rows_of_bucket * rows

    def _announce(self, index: int) -> None:
        """Tell the other ranks that this one reduces a group now, if the runtime sends gradients."""
        if self._announcements is not None and self.runtime.synchronises:
            self._announcements.say(index, self._used[index])

    def _check(self, number: int | None = None) -> None:
        """Wait until all ranks have announced what this rank has announced, at most up to a number.

        Raises:
            RuntimeError: some have announced something else.
        """
        if self._announcements is None:
            return
        try:
            self._announcements.check(self._announced if number is None else number)
        except RuntimeError as error:
            self._fail(error)
            raise

    @property
    def _announced(self) -> int:
        """The number of the last announcement."""
        return 0 if self._announcements is None else self._announcements.last

    def _fail(self, error: RuntimeError) -> None:
        """Let nothing be sent any more, and nothing be awaited that ranks will not send."""
        self.runtime.fail(error)

    def _buffer_of(self, index: int) -> ShardBuffer:
        """The memory in which the gradients of a group travel."""
        return self._buffers[index % SHARD_BUFFERS]

    def _send(self, index: int, gradients: torch.Tensor, take: Callable[[], object]) -> None:
        """Send the gradients of a group.

        Args:
            index: the number of the group.
            gradients: its memory, which holds them.
            take: takes the result out of the memory.
        """
        messages = self._bucket(index, gradients).messages.now()
        check = functools.partial(self._check, self._announced)
        self._buffer_of(index).send(self.runtime.submit(messages, gradients), check, take)

    def _finish(self, index: int, result: torch.Tensor) -> None:
        """Wait for the result of a group, unless it may come later."""
        if not self._may_defer(index, result):
            self.runtime.release()
            self._buffer_of(index).settle()

    def _may_defer(self, index: int, result: torch.Tensor) -> bool:
        """Whether the result of a group may come later, because FSDP does nothing with it before backward ends. On a
        device streams wait for the result, and the host does not."""
        return self.device.type == "cpu" and self._groups[index].leaves_alone(result)

    def _end_backward(self, waits: bool = True) -> None:
        """End the step behind the last callback of FSDP, which has one for each root: layers may have none in common.

        Args:
            waits: whether callbacks of other roots may follow, which reduce what has not been reduced yet.
        """
        if waits and any(group.is_in_backward for group in self._groups):
            Variable._execution_engine.queue_callback(functools.partial(weakly(self._end_backward), False))
        else:
            self._end_step()

    @torch.no_grad()
    def _end_step(self) -> None:
        self._backward = None
        self.runtime.release()
        for buffer in self._buffers:
            buffer.settle()
        if any(group.is_in_backward for group in self._groups):
            raise RuntimeError(
                "gckernels: a part of backward has ended before the whole, as activation checkpointing with "
                "use_reentrant=True does; use use_reentrant=False"
            )
        if self.runtime.synchronises:
            self.runtime.end_step()
        else:
            self.runtime.step += 1
        self.calls.end_step(True)

    @property
    def averages_now(self) -> bool:
        return any(group.averages_now for group in self._groups)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are accumulated without being reduced; the first backward outside reduces the
        sum."""
        model: Any = self._model()
        before = self.averages_now
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(before)
