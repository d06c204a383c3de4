"""Sparsifiers of whole units: a threshold is chosen, what exceeds it is sent as indices and values.

An algorithm says how the threshold is chosen; everything else is here, in ``sparse_host`` and in ``sparse_kernels``:
error feedback, selection in the order of the indices, the residual, chunks, merging.

The *key* of an element is its magnitude's bits as an integer, ordered like the magnitude, with inf and NaN above all
numbers. There is room for ``k = ceil(numel * ratio)`` entries, and an algorithm chooses two keys, ``lower`` and
``upper``: elements above ``upper`` are sent, the first k by index if there are more, and of those from ``lower`` to
``upper`` the first so many as there is room for. TopK's two keys are both the k-th largest. An algorithm that cannot
say beforehand how many elements pass chooses ``lower`` alone; its ``upper`` is the largest number, so that inf and NaN,
which everyone must see, are sent before all others. Zeros are never sent. Whatever is not sent stays in the residual.

Payload: header (``toolkit/payload.py``), then

- ``count``, int32: how many entries there are, at most ``k``;
- ``indices``, int32 ``[k]``: ascending, from the beginning of the chunk;
- ``values``, fp32 or bf16 ``[k]``.

What is behind the last entry is zero. A decoder believes nothing: a count beyond ``k`` is ``k``, an index outside the
chunk is passed over. Entries out of order, which no encoder writes, may be passed over, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import torch

from ..compressor import Compressor
from . import sparse_host, sparse_kernels, sparse_merge
from .checks import require_in, require_ratio
from .payload import Layout, status_ok, store_floats
from .sparse_keys import MAGNITUDE

LARGEST_SIZE = 2**31 - 1
"""Elements of a chunk, for an index of 32 bits."""
_PARTS = 10**9


class Sparsifier(Compressor):
    """Base of the compressors that send what exceeds a threshold (see the module's docstring).

    A subclass is a frozen dataclass with the fields ``ratio``, above 0 and at most 1, counted in units of ``1e-9``, and
    ``value_dtype``, ``torch.float32`` or ``torch.bfloat16``; and gives :meth:`bounds_reference` and what the host path
    and the kernels choose the same keys by.
    """

    needs_feedback = True
    digits: ClassVar[int]
    """Digits of the k-th largest key that are determined, of 3: the leading 11 bits, 10 more, the last 10. The keys are
    bounded by what begins with these digits. With none, they follow from the configuration."""
    sampled: ClassVar[bool] = False
    """It is the key of this rank in a sample, and ``lower`` alone."""

    if TYPE_CHECKING:  # the fields of subclasses

        @property
        def ratio(self) -> float: ...

        @property
        def value_dtype(self) -> torch.dtype: ...

    def __post_init__(self) -> None:
        require_ratio(self.name, self.ratio)
        require_in(self.name, "value_dtype", self.value_dtype, (torch.float32, torch.bfloat16))

    def capacity(self, numel: int) -> int:
        """``k``: entries that there is room for in the payload of ``numel`` elements, at least one if there are any."""
        # in integers, so that 100 times 0.07 is 7, and so that a symbol may stand for numel
        return -(-numel * max(1, round(self.ratio * _PARTS)) // _PARTS)

    def layout(self, numel: int) -> Layout:
        """Fields of the payload of ``numel`` elements: ``count``, ``indices``, ``values``."""
        return _layout(self.capacity(numel), self.value_dtype)

    def payload_nbytes(self, numel: int) -> int:
        return Layout.nbytes_of(*_fields(self.capacity(numel), self.value_dtype))

    @property
    def lowest(self) -> int:
        """``lower``, where it follows from the configuration (no ``digits``)."""
        raise NotImplementedError

    # ---------------------------------------------------------------- reference

    def bounds_reference(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        """The specification: ``(lower, upper)`` from the keys, int32 ``[numel]``, of elements of which the first is at
        position ``first`` of the unit."""
        raise NotImplementedError

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        layout, k = self.layout(numel), self.capacity(numel)
        keys = values.view(torch.int32) & MAGNITUDE
        lower, upper = self.bounds_reference(keys, k, seed, first)
        above = (keys > upper).nonzero()[:k, 0]
        between = ((keys > 0) & (keys >= lower) & (keys <= upper)).nonzero()[: k - above.numel(), 0]
        indices = torch.cat((above, between)).sort().values
        payload = layout.new(values.device)
        layout.view(payload, "count")[0] = indices.numel()
        layout.view(payload, "indices")[: indices.numel()] = indices.to(torch.int32)
        store_floats(layout.view(payload, "values")[: indices.numel()], values[indices])
        return payload

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        layout, k = self.layout(numel), self.capacity(numel)
        count = int(layout.view(payload, "count").clamp(0, k))
        indices, values = (layout.view(payload, name)[:count] for name in ("indices", "values"))
        inside = (indices >= 0) & (indices < numel)
        dense = torch.zeros(numel, device=payload.device)
        dense.index_add_(0, indices[inside], values[inside].float())
        return torch.where(status_ok(payload), dense, torch.nan)

    # ---------------------------------------------------------------- host path and kernels

    def encode_host(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        sparse_host.encode(self, grad, residual, payload, self._checked(size), seed)

    def decode_host(self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool) -> None:
        sparse_host.decode(self, payloads, out, size, scale, accumulate)

    def encode_triton(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        sparse_kernels.encode(self, grad, residual, payload, self._checked(size), seed)

    def decode_triton(
        self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
    ) -> None:
        sparse_merge.decode(self, payloads, out, size, scale, accumulate)

    def _checked(self, size: int) -> int:
        if size > LARGEST_SIZE:
            raise ValueError(f"{self.name}.encode: size must be below 2**31, the reach of an index, got {size}")
        return size


@functools.lru_cache(maxsize=65536)  # asked for several times in every step
def _layout(k: int, value_dtype: torch.dtype) -> Layout:
    return Layout.of(*_fields(k, value_dtype))


def _fields(k: int, value_dtype: torch.dtype) -> tuple[tuple[str, torch.dtype, int], ...]:
    return ("count", torch.int32, 1), ("indices", torch.int32, k), ("values", value_dtype, k)
