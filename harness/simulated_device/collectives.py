"""``simccl``: a backend of collectives with NCCL's meaning, for the simulated device; Gloo carries the data.

A collective runs on a stream of its communicator, behind the stream that is current when it is issued. ``wait`` lets
the current stream follow it, and the host goes on. All ranks of a communicator must issue the same collectives, with
the same sizes and types, in the same order, which is checked with each of them. Tensors of the CPU go to Gloo.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from . import module
from .module import compiled, on_host, tensors_in

issued: list[str] = []
"""The communicators of the collectives that this rank has issued, in order."""

_not_awaited: set[_Ended] = set()
_last_awaited: list[_Ended] = []
"""The works for which nobody has waited yet, and the last other one. DDP keeps one in C++, and asks it for its future
when it has waited; so its object of Python must last."""


_Group: Any = dist.ProcessGroup  # whose methods have other arguments in each release

_ON_ALL_RANKS = {"gather": 1, "scatter": 0}
"""The arguments that have tensors on all ranks, of collectives with a root."""


class _Ended(Work):
    """A collective on the stream of its communicator. It keeps its tensors until somebody waits, as NCCL does."""

    def __init__(self, stream: torch.Stream, used: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._stream, self._used, self._outputs = stream, used, outputs
        _not_awaited.add(self)
        self._behind = stream.record_event()
        devices: list[Any] = [stream.device]
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        with stream:
            self._future.set_result(outputs)

    def wait(self, timeout: Any = None) -> bool:
        module.current_stream().wait_event(self._behind)
        self._let_go()
        return True

    def _let_go(self) -> None:
        _not_awaited.discard(self)
        if all(each.numel() == 1 for each in self._used):  # such as DDP's number of ranks that have inputs
            _last_awaited[:] = [self]
        self._used = []

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._behind.query()

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        for each in self._used:  # whoever waits for the future does not tell the work
            each.record_stream(self._stream)
        self._let_go()
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class SimulatedGroup(_Group):  # type: ignore[misc]
    """A communicator.

    Args:
        gloo: carries the data.
        options: the arguments with which torch makes a group.
    """

    def __init__(self, gloo: Any, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo, self._ranks, self._rank = gloo, options.group_size, options.group_rank
        self._streams: dict[torch.device, torch.Stream] = {}
        self._sending: list[tuple[Any, Any]] = []
        self._count = itertools.count()
        self._name = self._text = ""
        self.options = gloo.options

    def _issue(self, name: str, given: Any, call: Callable[..., None], outputs: Any) -> Any:
        """Put a collective onto this communicator's stream.

        Args:
            name: its name.
            given: its arguments.
            call: does it with these arguments, whose tensors are the host's then.
            outputs: the tensors among them that it writes.
        """
        written = tensors_in([outputs])
        device = tensors_in(given)[0].device
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(module.current_stream(device))
        compared = tensors_in([given[_ON_ALL_RANKS[name]] if name in _ON_ALL_RANKS else given])
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in compared)
        what = f"{name} number {next(self._count)} of {self._name} with {shapes}"
        issued.append(self._name)
        arguments = on_host(list(given))

        def work() -> None:
            if name not in ("send", "recv"):
                self._compare(what)
            call(*arguments)

        compiled.launch(stream.stream_id, tensors_in(given), written, name, work)
        return _Ended(stream, tensors_in(given), written)

    def _compare(self, what: str) -> None:
        """Raise a RuntimeError unless all ranks have issued the same collective."""
        mine = torch.frombuffer(bytearray(hashlib.sha256(what.encode()).digest()), dtype=torch.uint8)
        everyones = torch.empty(self._ranks * mine.numel(), dtype=torch.uint8, device="cpu")
        self._gloo._allgather_base(everyones, mine).wait()
        differing = [rank for rank, row in enumerate(everyones.view(self._ranks, -1)) if not torch.equal(row, mine)]
        if differing:
            raise RuntimeError(f"rank {self._rank} of a group issues {what}; others do not: {differing}")

    # ---------------------------------------------------------------- sums

    def _sum(self, total: torch.Tensor, operation: Any) -> None:
        is_mean = operation == dist.ReduceOp.AVG
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        self._gloo.allreduce([total], options).wait()
        if is_mean:
            total.div_(self._ranks)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if tensors[0].device.type == "cpu":
            return self._gloo.allreduce(tensors, options) if options else self._gloo.allreduce(tensors)
        operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)

        def call(*each: Any) -> None:
            for one in each:
                self._sum(one, operation)

        return self._issue("allreduce", tensors, call, tensors)

    allreduce_coalesced = allreduce

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [given], options)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, given: Any, options: Any = None) -> Any:
        operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)

        def call(outputs: Any, given: Any) -> None:
            for output, each in zip(outputs, given, strict=True):
                total = each.clone()
                self._sum(total, operation)
                output.copy_(total.view(self._ranks, -1)[self._rank].view_as(output))

        if outputs[0].device.type == "cpu":
            return self._gloo.reduce_scatter_tensor_coalesced(outputs, given)
        return self._issue("reduce_scatter", [outputs, given], call, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def allgather_into_tensor_coalesced(self, outputs: Any, given: Any, options: Any = None) -> Any:
        def call(outputs: Any, given: Any) -> None:
            for output, each in zip(outputs, given, strict=True):
                self._gloo._allgather_base(output, each).wait()

        return self._issue("allgather", [outputs, given], call, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        def call(tensors: Any, peer: int, tag: int) -> None:  # its receiver may be about to send, too
            copies = [each.clone() for each in tensors]
            self._sending = [each for each in self._sending if not each[1].is_completed()]
            self._sending.append((copies, self._gloo.send(copies, peer, tag)))

        if tensors[0].device.type == "cpu":
            return self._gloo.send(tensors, peer, tag)
        return self._issue("send", [tensors, peer, tag], call, [])

    # ---------------------------------------------------------------- copies, of which Gloo has all

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def getSize(self) -> int:
        return self._ranks

    def getRank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "simccl"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._text = text

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._text

    def shutdown(self) -> None:
        module.synchronize()

    abort = shutdown


def _copying(name: str) -> Callable[..., Any]:
    """A collective that only copies, into its first argument. Gloo's method has this name."""

    def method(group: SimulatedGroup, *given: Any) -> Any:
        carry = getattr(group._gloo, name)
        if tensors_in(given)[0].device.type == "cpu":
            return carry(*given)
        return group._issue(name, given, lambda *arguments: carry(*arguments).wait(), given[0])

    return method


# newer names of torch, and older ones
_COPYING = {
    "broadcast": "broadcast",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "allgather": "allgather",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
    "alltoall": "alltoall",
    "gather": "gather",
    "scatter": "scatter",
    "recv": "recv",
}
for _name, _carry in _COPYING.items():
    setattr(SimulatedGroup, _name, _copying(_carry))
