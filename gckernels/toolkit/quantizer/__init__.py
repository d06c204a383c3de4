"""Element-wise quantisers made of a statistic and two maps.

A subclass of :class:`MapQuantizer` names its ``bits``, its ``block`` (``None``: one statistic for the whole unit) and
its :class:`Maps`. Reference, host path, kernels and launchers follow from these. The functions are written once, in
torch: they are the specification, and the host path and the kernels are compiled from them (``lowering.py``). The last
argument of every function is the quantiser's :class:`~gckernels.toolkit.constants.Constants`. A function for which
handwritten Triton gives a better kernel is a :class:`Dual`.

The payload of ``n`` elements consists of the header, ``stats`` and ``codes``. ``stats`` holds the first statistic of
every block in order, then, where a quantiser has two, the second of every block. ``codes`` holds ``bits`` bits per
element. A field that would be empty is left out.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ...codec import Backend, Codec, on_first_use
from .. import bitpack, random
from ..constants import Constants
from ..payload import PayloadLayout, status_ok, store_floats
from .maps import LARGEST, MAX, MIN, PADDING, SUM, Dual, Function, Maps, Shortcut, Statistic

__all__ = [
    "LARGEST",
    "MAX",
    "MIN",
    "SUM",
    "Dual",
    "Function",
    "MapQuantizer",
    "Maps",
    "Shortcut",
    "Statistic",
]


def _host() -> Backend:
    from .host import QuantizerHost

    return QuantizerHost()


def _triton() -> Backend:
    from .launches import QuantizerTriton

    return QuantizerTriton()


@dataclass(frozen=True)
class MapQuantizer(Codec):
    """Base class of the quantisers made of :class:`Maps`."""

    maps: ClassVar[Maps]
    stats_dtype: ClassVar[torch.dtype] = torch.float32

    if TYPE_CHECKING:  # subclasses have these as fields or as class attributes

        @property
        def bits(self) -> int: ...

        @property
        def block(self) -> int | None: ...

    @functools.cached_property
    def constants(self) -> Constants:
        """The constants that the maps get as ``C``: the fields, ``bits`` and ``block``. Subclasses may add to them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Constants(**fields | {"bits": self.bits, "block": self.block})

    def layout(self, numel: int) -> PayloadLayout:
        """The layout of the payload of ``numel`` elements: ``stats`` (unless there are none) and ``codes``."""
        return _layout(self.stats_dtype, self.num_stats, self.bits, self.block, numel)

    def payload_nbytes(self, numel: int) -> int:
        # not layout(numel).nbytes: in a compiled function numel may be a symbol, which cannot be the key of a cache
        return PayloadLayout.nbytes_of(*_fields(self.stats_dtype, self.num_stats, self.bits, self.block, numel))

    @property
    def encodes_residuals(self) -> bool:
        """Whether residuals may be in 8 bits: errors may, momenta may not, because they grow by small steps."""
        return self.traits.conserves

    @property
    def shard_compressor(self) -> MapQuantizer:
        return self

    @property
    def shortcut(self) -> Shortcut | None:
        """The shortcut of the statistic of a block; ``None`` for statistics of whole units."""
        statistic = self.maps.statistic
        return statistic.shortcut if statistic and self.block is not None else None

    @property
    def num_stats(self) -> int:
        """Number of statistics per block."""
        return 0 if self.maps.statistic is None else self.maps.statistic.size

    # ---------------------------------------------------------------- reference

    def accumulate(self, grad: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.maps.accumulate(grad, residual, self.constants)

    def keep(self, values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        return self.maps.keep(values, decoded, self.constants)

    def merge(self, total: torch.Tensor, scale: float) -> torch.Tensor:
        return self.maps.merge(total, scale, self.constants)

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        layout = self.layout(numel)
        payload = layout.new(values.device)
        stats = self.statistics_reference(values, numel)
        codes = torch.zeros(numel, dtype=torch.int32, device=values.device)
        codes[: values.numel()] = self.codes_reference(values, stats, seed, first)
        if self.num_stats:
            store_floats(layout.view(payload, "stats"), stats.flatten())
        layout.view(payload, "codes").copy_(bitpack.pack(codes, self.bits))
        return payload

    def statistics_reference(self, values: torch.Tensor, numel: int) -> torch.Tensor:
        """Statistics as the payload of ``numel`` elements holds them: fp32 ``[num_stats, blocks]``.

        All statistics of a block are NaN if one of them is not finite, and 0 if the block has no elements.
        """
        statistic, block = self.maps.statistic, self.block or max(numel, 1)
        blocks = 1 if self.block is None else -(-numel // block)
        if statistic is None:
            return values.new_zeros(0, blocks)
        counts = values.numel() - torch.arange(blocks, dtype=torch.int64, device=values.device) * block
        partials = []
        for kind, term in zip(statistic.kinds, statistic.terms(values, self.constants), strict=True):
            rows = values.new_full((blocks, block), PADDING[kind])
            rows.view(-1)[: values.numel()] = term
            reduced = rows.sum(1) if kind == SUM else rows.amin(1) if kind == MIN else rows.amax(1)
            partials.append(reduced + 0.0)  # never -0.0
        finished = statistic.finish(tuple(partials), counts.clamp(1, block).float(), self.constants)
        stats = torch.stack([stat.expand(blocks) for stat in finished])
        stats = torch.where(torch.isfinite(stats).all(0), stats, torch.nan).to(self.stats_dtype).float()
        return torch.where(counts > 0, stats, 0.0)

    def codes_reference(self, values: torch.Tensor, stats: torch.Tensor, seed: int, first: int) -> torch.Tensor:
        """Codes of ``values [numel]``, given the statistics: int32 ``[numel]``, 0 where a statistic is NaN."""
        numel = values.numel()
        block = self.block or max(numel, 1)
        each = tuple(stat.repeat_interleave(block)[:numel] for stat in stats)
        dither = None
        if self.traits.stochastic:
            dither = random.dither(seed, first, numel, self.maps.dither_base, values.device)
        codes = self.maps.quantize(values, each, dither, self.constants)
        for stat in each:
            codes = torch.where(stat.isnan(), 0, codes)
        return codes.to(torch.int32)

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        layout, block = self.layout(numel), self.block or max(numel, 1)
        stats = layout.view(payload, "stats").float().view(self.num_stats, -1) if self.num_stats else ()
        each = tuple(stat.repeat_interleave(block)[:numel] for stat in stats)
        codes = bitpack.unpack(layout.view(payload, "codes"), self.bits, numel)
        return torch.where(status_ok(payload), self.maps.dequantize(codes, each, self.constants), torch.nan)

    # ---------------------------------------------------------------- host path and kernels

    host = on_first_use(_host)
    triton = on_first_use(_triton)


@functools.lru_cache(maxsize=65536)  # every step needs the layout of a unit several times
def _layout(stats_dtype: torch.dtype, num_stats: int, bits: int, block: int | None, numel: int) -> PayloadLayout:
    return PayloadLayout.of(*_fields(stats_dtype, num_stats, bits, block, numel))


def _fields(
    stats_dtype: torch.dtype, num_stats: int, bits: int, block: int | None, numel: int
) -> tuple[tuple[str, torch.dtype, int], ...]:
    codes = ("codes", torch.uint8, bitpack.packed_nbytes(numel, bits))
    if not num_stats:
        return (codes,)
    blocks = 1 if block is None else -(-numel // block)
    return ("stats", stats_dtype, num_stats * blocks), codes
