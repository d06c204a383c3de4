"""Averaging of a DDP model's gradients after backward, as DDP does it during backward.

While a step is measured, DDP does not synchronise, because waiting for the network would be in the times. Its work is
done here, in two parts. During backward every gradient is copied into a bucket and divided by the number of ranks, when
it is ready, because DDP takes time for this, too. After backward the buckets are summed. Buckets, their order, factors
and collectives are those of DDP, so the gradients are, too, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..plans.strides import grad_strides, in_reals

_BUCKETS = "_get_zeros_like_grad_buckets"  # a function of the reducer that Join uses


@dataclass(eq=False)
class _Slot:
    """The place of a parameter's gradient in a bucket."""

    parameter: torch.nn.Parameter
    view: torch.Tensor
    is_filled: bool = False


class LateAveraging:
    """DDP's buckets, and what DDP would do with them.

    Args:
        ddp_model: the model, which has had the forward after which its buckets stay as they are.
        parameters: the parameters that DDP averages, by name.

    Attributes:
        buckets: the names of the parameters in each bucket, in the order of the bucket's memory, first launched first.
    """

    def __init__(self, ddp_model: DistributedDataParallel, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._group = ddp_model.process_group
        self._share = 1.0 / dist.get_world_size(self._group)
        self._finds_unused = ddp_model.find_unused_parameters or ddp_model.static_graph
        self._vectors: list[torch.Tensor] = []
        self._slots: dict[int, _Slot] = {}
        buckets = []
        for bucket in getattr(ddp_model.reducer, _BUCKETS)():
            buffer, members, first = in_reals(bucket.buffer()).view(-1), bucket.parameters(), 0
            for parameter in members:
                real = in_reals(parameter)
                view = buffer[first : first + real.numel()].as_strided(real.shape, grad_strides(real))
                self._slots[id(parameter)] = _Slot(parameter, view)
                first += real.numel()
            assert first == buffer.numel()
            self._vectors.append(buffer)
            buckets.append(tuple(names[id(parameter)] for parameter in members))
        self.buckets = tuple(buckets)

    @staticmethod
    def is_possible(ddp_model: Any) -> bool:
        """Whether this release of torch says which buckets a DDP model has."""
        return hasattr(ddp_model.reducer, _BUCKETS)

    @torch.no_grad()
    def collect(self, parameter: torch.nn.Parameter) -> None:
        """Copy the gradient of a parameter into its bucket, divided by the number of ranks."""
        slot = self._slots[id(parameter)]
        if parameter.grad is None:
            slot.view.zero_()
        else:
            torch.mul(in_reals(parameter.grad), self._share, out=slot.view)
        slot.is_filled = True

    @torch.no_grad()
    def average(self, used: Collection[int]) -> None:
        """Average all gradients. Collective, at the end of backward.

        Args:
            used: the ids of the parameters that have had a gradient on this rank since the last averaging.
        """
        slots = list(self._slots.values())
        for slot in slots:
            if not slot.is_filled:
                self.collect(slot.parameter)
            slot.is_filled = False
        works = [dist.all_reduce(vector, group=self._group, async_op=True) for vector in self._vectors]
        for work in works:
            assert work is not None
            work.wait()
        used_anywhere = self._used_anywhere([id(slot.parameter) in used for slot in slots])
        for slot, is_used in zip(slots, used_anywhere, strict=True):
            if not is_used:
                continue
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_strided(
                    slot.parameter.shape,
                    grad_strides(slot.parameter),
                    dtype=slot.parameter.dtype,
                    device=slot.parameter.device,
                )
            in_reals(slot.parameter.grad).copy_(slot.view)

    def _used_anywhere(self, used: list[bool]) -> list[bool]:
        """Which parameters any rank has used. DDP leaves the gradients of the others as they are."""
        if not self._finds_unused:
            return [True] * len(used)
        flags = torch.tensor(used, dtype=torch.int32, device=self._vectors[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]
