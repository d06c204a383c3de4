"""The ranks of a publisher: the shards that each has, and their agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..format.elements import Elements, Piece, vector_of
from ..format.layout import TensorEntry, TensorLayout

T = TypeVar("T")


class PublisherRanks:
    """All ranks that publish one model, or this process alone.

    Args:
        group: the ranks; by default all of them, if there is a default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.rank = 0 if self._group is None else dist.get_rank(self._group)

    def together(self, work: Callable[[], T]) -> T:
        """The result of ``work`` on this rank, if it returns on all ranks. Collective.

        Raises:
            Exception: ``work`` has raised it, on a process alone.
            RuntimeError: it has raised on some rank. Every rank raises.
        """
        if self._group is None:
            return work()
        from gckernels.sync.communication.agreement import Failure, together
        from gckernels.sync.communication.collectives import device_of_group

        result = together(self._group, device_of_group(self._group), work)
        if isinstance(result, Failure):
            raise RuntimeError(f"publish: {result.text}")
        return result

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks, of up to 4096 bytes each. Collective."""
        if self._group is None:
            return [text]
        from gckernels.sync.communication.collectives import device_of_group, exchange_text

        return exchange_text(self._group, device_of_group(self._group), text)

    def elements(self, layout: TensorLayout, tensors: Mapping[str, torch.Tensor]) -> Elements:
        """The elements that this rank publishes: its shards, and on the first rank what all have.

        Raises:
            ValueError: a tensor is cut in another way than along its first dimension, over one dimension of a mesh.
        """
        pieces = []
        for entry in layout.entries:
            tensor = tensors[entry.name]
            found = self._shard(entry, tensor) if hasattr(tensor, "to_local") else self._whole(entry, tensor)
            if found is not None and found.numel:
                pieces.append(found)
        return Elements(layout, tuple(pieces))

    def _whole(self, entry: TensorEntry, tensor: torch.Tensor) -> Piece | None:
        return None if self.rank else _piece(entry, 0, tensor)

    def _shard(self, entry: TensorEntry, tensor: torch.Tensor) -> Piece | None:
        """The rows of a DTensor that this rank has, unless another replica publishes them."""
        from torch.distributed.tensor import Replicate, Shard

        shards: Any = tensor
        mesh, first, sharded = shards.device_mesh, 0, 0
        for dimension, placement in enumerate(shards.placements):
            place = dist.get_rank(mesh.get_group(dimension))
            if type(placement) is Shard and placement.dim == 0:
                rows = -(-entry.shape[0] // mesh.size(dimension))  # as torch.chunk cuts
                first, sharded = min(place * rows, entry.shape[0]), sharded + 1
            elif type(placement) is not Replicate:
                sharded = 2
            elif place:
                return None
            if sharded > 1:
                raise ValueError(
                    f"publish: {entry.name} is placed as {shards.placements}, and only rows may be cut, once"
                )
        return _piece(entry, first * math.prod(entry.shape[1:]), shards.to_local())


def _piece(entry: TensorEntry, first: int, tensor: torch.Tensor) -> Piece:
    """The elements of a tensor, of which the first one is number ``first`` of the whole tensor."""
    flat = vector_of("publish", entry.name, tensor)
    if tensor.dtype == entry.dtype:
        flat = flat.view(entry.kind.bits_dtype)
    return Piece(entry, entry.first + first * (entry.dtype.itemsize // entry.kind.nbytes), flat)
