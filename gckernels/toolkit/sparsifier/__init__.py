"""Sparsifiers of whole units: a threshold is chosen, what exceeds it is sent as indices and values.

An algorithm says how the threshold is chosen; everything else is here, in ``sparse_host`` and in ``sparse_kernels``:
error feedback, selection in the order of the indices, the residual, chunks, merging.

The *key* of an element is its magnitude's bits as an integer, ordered like the magnitude, with inf and NaN above all
numbers. There is room for ``k = ceil(numel * ratio)`` entries, and an algorithm chooses two keys, ``lower`` and
``upper``: elements above ``upper`` are sent, the first k by index if there are more, and of those from ``lower`` to
``upper`` the first so many as there is room for. TopK's two keys are both the k-th largest. An algorithm that cannot
say beforehand how many elements pass chooses ``lower`` alone; its ``upper`` is the largest number, so that inf and NaN,
which everyone must see, are sent before all others. Zeros are never sent. Whatever is not sent stays in the residual;
``sparse_memory`` says what else an algorithm may remember.

Payload: header (``toolkit/payload.py``), then the entries, ascending by index from the beginning of the chunk, as
``toolkit/sparsifier/entries.py`` has them: ``highs``, ``lows``, ``scales`` and ``values``.

Size in bytes: ``16 + field(4 * ceil((k + ceil(n / 2**low)) / 32)) + field(k * low / 8) +
field(4 * ceil(k / 64)) * (value_bits < 16) + field(k * value_bits / 8)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from ...batch import Batch
from ...compressor import Compressor
from ..fields import require_in, require_ratio
from ..kernels.launch_batch import LaunchBatch
from ..payload import Layout, status_ok
from . import decode_kernels, encode_kernels, host
from .entries import SPAN, VALUE_BITS, EntryFormat, low_bits
from .keys import LARGEST_SIZE, RATIO_PARTS, capacity, keys_of, ratio_parts
from .states import Memory


class Sparsifier(Compressor):
    """Base of the compressors that send what exceeds a threshold (see the module's docstring).

    A subclass is a frozen dataclass with the fields ``ratio``, above 0 and at most 1, counted in units of ``1e-9``, and
    ``value_bits``, 32 (fp32), 16 (bf16), 8, 4 or 2; and gives :meth:`bounds_reference` and what the host path
    and the kernels choose the same keys by.
    """

    needs_feedback = True
    digits: ClassVar[int]
    """Digits of the k-th largest key that are determined, of 3: the leading 11 bits, 10 more, the last 10. The keys are
    bounded by what begins with these digits. With none, they follow from the configuration."""
    sampled: ClassVar[bool] = False
    """It is the key of this rank in a sample, and ``lower`` alone."""
    trimmed: ClassVar[bool] = False
    """Where more than ``k`` elements reach the sampled key, ``lower`` and ``upper`` are the k-th largest key of all."""
    memory: ClassVar[Memory] = Memory()
    """What is remembered from step to step."""

    if TYPE_CHECKING:  # the fields of subclasses

        @property
        def ratio(self) -> float: ...

        @property
        def value_bits(self) -> int: ...

    def __post_init__(self) -> None:
        require_ratio(self.name, self.ratio)
        require_in(self.name, "value_bits", self.value_bits, VALUE_BITS)

    def capacity(self, numel: int) -> int:
        """``k``: entries that there is room for in the payload of ``numel`` elements, at least one if there are any."""
        return capacity(numel, self.ratio)

    @property
    def entries(self) -> EntryFormat:
        """How entries are written."""
        return EntryFormat(low_bits(ratio_parts(self.ratio), RATIO_PARTS), self.value_bits)

    def layout(self, numel: int) -> Layout:
        """Fields of the payload of ``numel`` elements: ``highs``, ``lows``, ``scales`` (not always), ``values``."""
        return self.entries.layout(numel, self.capacity(numel))

    def payload_nbytes(self, numel: int) -> int:
        return Layout.nbytes_of(*self.entries.fields(numel, self.capacity(numel)))

    @property
    def lowest(self) -> int:
        """``lower``, where it follows from the configuration (no ``digits``)."""
        raise NotImplementedError

    @property
    def states(self) -> int:  # type: ignore[override]  # a class attribute in the base
        return self.memory.states

    # ---------------------------------------------------------------- reference

    def accumulate(self, grad: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.memory.accumulate(grad, residual)

    def keep(self, values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        return self.memory.keep(values, decoded)

    def bounds_reference(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        """The specification: ``(lower, upper)`` from the keys, int32 ``[numel]``, of elements of which the first is at
        position ``first`` of the unit."""
        raise NotImplementedError

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        k = self.capacity(numel)
        keys = keys_of(values)
        lower, upper = self.bounds_reference(keys, k, seed, first)
        above = (keys > upper).nonzero()[:k, 0]
        between = ((keys > 0) & (keys >= lower) & (keys <= upper)).nonzero()[: k - above.numel(), 0]
        indices = torch.cat((above, between)).sort().values
        return self.entries.write(indices, values[indices], numel, k)

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        indices, values, wrong = self.entries.read(payload, numel, self.capacity(numel))
        spans = torch.zeros(-(-numel // SPAN), SPAN, device=payload.device)
        inside = ~wrong & (indices < numel)
        spans.view(-1)[indices[inside]] = values[inside]
        damaged = indices[wrong] // SPAN
        spans[damaged[damaged < len(spans)]] = torch.nan
        return torch.where(status_ok(payload), spans.flatten()[:numel], torch.nan)

    # ---------------------------------------------------------------- host path and kernels

    def compile_host(self, recodes: bool = False) -> None:
        host.build()

    def encode_host(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        host.encode(self, grad, residual, payload, self._checked(size), seed)

    def decode_host(self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool) -> None:
        host.decode(self, payloads, out, size, scale, accumulate)

    def encode_triton(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        encode_kernels.encode(self, grad, residual, payload, self._checked(size), seed)

    def decode_triton(
        self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
    ) -> None:
        decode_kernels.decode(self, payloads, out, size, scale, accumulate)

    def batch(self, place: str) -> Batch:
        return LaunchBatch(self, place) if place == "triton" else Batch(self, place)

    def _checked(self, size: int) -> int:
        if size > LARGEST_SIZE:
            raise ValueError(f"{self.name}.encode: size must be below 2**31, the reach of an index, got {size}")
        return size
