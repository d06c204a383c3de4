"""Element-wise quantisers from a statistic and two maps.

A subclass of :class:`MapQuantizer` names its ``bits``, its ``block`` (``None``: one statistic for the whole unit) and
its :class:`Maps`; reference, host path and kernels follow. Every function comes twice. The array form is written with
operators and methods that torch tensors and NumPy arrays share: on tensors it is the specification, on arrays the host
path. The Triton form must give the same bits.

Payload of ``n`` elements: header; ``stats``, one per block; ``codes``, ``bits`` bits each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ..compressor import Compressor
from . import bitpack, map_host, map_kernels, random
from .payload import Layout, status_ok, store_floats

Array = Any  # torch.Tensor or numpy.ndarray


@dataclass(frozen=True)
class Dual:
    """One function on tensors and NumPy arrays, and in Triton (``@triton.jit``)."""

    array: Callable[..., Array]
    triton: Any


@dataclass(frozen=True)
class Maps:
    """A quantiser's functions; ``rows`` below are blocks, ``[rows, block]``, padded with zeros.

    Attributes:
        reduce: ``(values, axis) -> partial``: must be non-finite when any value is, and treat zeros as absent.
        combine: ``(partial, partial) -> partial``, for statistics of a whole unit.
        finish: ``(partial, count, bits) -> stat``; ``count`` is the number of elements, at least 1.
        quantize: ``(values, stat, u, bits) -> code`` in ``0 .. 2**bits - 1``; ``stat`` is ``[rows, 1]``, ``u`` uniform
            in [0, 1) like ``values`` (stochastic quantisers only). Array form: bool or integral fp32; Triton form:
            ``int32``.
        dequantize: ``(code, stat, bits) -> value``, fp32; must be NaN when ``stat`` is. Takes what ``quantize`` gives;
            the array form also takes one-bit codes as fp32.
    """

    reduce: Dual
    combine: Dual
    finish: Dual
    quantize: Dual
    dequantize: Dual


@dataclass(frozen=True)
class MapQuantizer(Compressor):
    """Base of the quantisers made of :class:`Maps`."""

    maps: ClassVar[Maps]
    stats_dtype: ClassVar[torch.dtype] = torch.float32

    if TYPE_CHECKING:  # subclasses have these as fields or as class attributes

        @property
        def bits(self) -> int: ...

        @property
        def block(self) -> int | None: ...

    def layout(self, numel: int) -> Layout:
        """Fields of the payload of ``numel`` elements: ``stats`` and ``codes``."""
        return _layout(self.stats_dtype, self.bits, self.block, numel)

    def payload_nbytes(self, numel: int) -> int:
        return self.layout(numel).nbytes

    # ---------------------------------------------------------------- reference

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        maps, layout = self.maps, self.layout(numel)
        stats_count, block = layout["stats"].count, self.block or max(numel, 1)
        rows = torch.zeros(stats_count, block)
        rows.view(-1)[: values.numel()] = values
        counts = (values.numel() - torch.arange(stats_count) * block).clamp(1, block).float()
        stat = self.round_stat(maps.finish.array(maps.reduce.array(rows, 1), counts, self.bits))
        u = random.uniform(seed, first, rows.numel()).view_as(rows) if self.stochastic else None
        codes = maps.quantize.array(rows, stat[:, None], u, self.bits)
        codes = torch.where(stat.isnan()[:, None], 0, codes).flatten()[:numel]
        codes[values.numel() :] = 0
        stat[-(-values.numel() // block) if self.block else stats_count :] = 0
        payload = layout.new()
        store_floats(layout.view(payload, "stats"), stat)
        layout.view(payload, "codes").copy_(bitpack.pack(codes, self.bits))
        return payload

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        layout, block = self.layout(numel), self.block or max(numel, 1)
        stat = layout.view(payload, "stats").float()
        stat = torch.where(status_ok(payload), stat, torch.nan).repeat_interleave(block)[:numel]
        codes = bitpack.unpack(layout.view(payload, "codes"), self.bits, numel).float()
        return self.maps.dequantize.array(codes, stat, self.bits)

    def round_stat(self, stat: Array) -> Array:
        """A statistic as the payload holds it: NaN when not finite, in the payload's precision, as fp32."""
        if isinstance(stat, np.ndarray):
            stat = np.where(np.isfinite(stat), stat, np.float32(np.nan))
            if self.stats_dtype == torch.float32:
                return stat
            return torch.from_numpy(stat).to(self.stats_dtype).float().numpy()
        return torch.where(torch.isfinite(stat), stat, torch.nan).to(self.stats_dtype).float()

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
        map_host.encode_map(self, grad, residual, payload, size, seed)

    def decode_host(self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool) -> None:
        map_host.decode_map(self, payloads, out, size, scale, accumulate)

    def encode_triton(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        map_kernels.encode_map(self, grad, residual, payload, size, seed)

    def decode_triton(
        self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
    ) -> None:
        map_kernels.decode_map(self, payloads, out, size, scale, accumulate)


@functools.lru_cache(maxsize=65536)  # a unit's layout is asked for several times in every step
def _layout(stats_dtype: torch.dtype, bits: int, block: int | None, numel: int) -> Layout:
    blocks = 1 if block is None else -(-numel // block)
    return Layout.of(("stats", stats_dtype, blocks), ("codes", torch.uint8, bitpack.packed_nbytes(numel, bits)))
