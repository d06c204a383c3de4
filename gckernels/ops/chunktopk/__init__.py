"""ChunkTopK: the largest entries of every group of 4096 elements, with error feedback.

This is the sparsifier of DeMo (Peng et al., arXiv:2411.19870), there after a discrete cosine transform, and of
SparseLoCo (Sarfi et al., arXiv:2508.15706). It does not select over the whole unit, so it takes one pass over memory.
The payload has a fixed size, and indices have 12 bits.

The elements are cut into *groups* of ``chunk`` elements. Groups start anew at every chunk of an all-to-all. The last
group is padded with zeros, which can be selected like any element. The ``k`` entries of largest magnitude of each group
are sent in the order of their indices; of equal magnitudes the lower index goes first.

Wire format: header (``toolkit/payload.py``), then

- ``scales``, fp32, one per group; absent with 16 bits;
- ``indices``, 12 bits each, two in three bytes, lowest bits first;
- ``values``: bf16, or codes of 8, 4 or 2 bits as in ``BlockQuant``. The scale is the group's largest magnitude divided
  by ``2**(bits - 1) - 1`` or, with 2 bits, the mean magnitude of the sent entries (summed pairwise).

Size in bytes: ``16 + field(4 * ceil(n / chunk)) * (value_bits < 16) + field(ceil(n / chunk) * k * 12 / 8) +
field(ceil(n / chunk) * k * value_bits / 8)``.

A group with inf or NaN, or whose mean magnitude overflows, is sent as the indices ``0 .. k - 1`` with a NaN scale and
codes 0, or with NaN values. The whole group decodes to NaN, and its residual stays unchanged. A damaged group, whose
indices do not ascend, decodes to NaN as well.

Example: ``ChunkTopK(chunk=64, k=8, value_bits=4)``, ``p = [0, -7, 0.5, 0, 3, 0, 0, 0, 1, 2.25]``. Five entries are not
zero, so the zeros at 0, 3 and 5 go along. Scale 1, codes 8 1 8 8 11 8 9 10 (0, -7, 0, 0, 3, 0, 1, 2)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  00 00 80 3F 00 .. 00                               1.0
    bytes 32..47  00 10 00 02 30 00 04 50 00 08 90 00 00 00 00 00    0 1, 2 3, 4 5, 8 9
    bytes 48..63  18 88 8B A9 00 .. 00                               codes, low nibble first
    decoded [0, -7, 0, 0, 3, 0, 0, 0, 1, 2], residual [0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0.25]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codec import Backend, Codec, on_first_use
from ...compressor import Traits
from ...registration import register
from ...toolkit import bitpack
from ...toolkit.fields import require_in, shown
from ...toolkit.linear import (
    absmax_scale_torch,
    dequantize_torch,
    pairwise_sum_torch,
    quantize_torch,
    zero_below_normal_torch,
)
from ...toolkit.payload import PayloadLayout, status_ok
from ...toolkit.sparsifier.keys import MAGNITUDE
from .pack12 import MAX_GROUP, pack12, packed12_nbytes, unpack12

_NAN_BITS = 0x7FC0  # NaN in bf16


def _host() -> Backend:
    from .host import ChunkTopKHost

    return ChunkTopKHost()


def _triton() -> Backend:
    from .launchers import ChunkTopKTriton

    return ChunkTopKTriton()


@register
@dataclass(frozen=True)
class ChunkTopK(Codec):
    """``k`` of every ``chunk`` elements, as 12-bit indices and short values (see the module's docstring).

    Attributes:
        chunk: elements per group, a power of two from 64 to 4096.
        k: entries sent per group, a multiple of 8 from 8 to ``chunk``.
        value_bits: 16 (bf16), 8, 4 or 2.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)

    chunk: int = 4096
    k: int = 64
    value_bits: int = 16

    def __post_init__(self) -> None:
        require_in("ChunkTopK", "chunk", self.chunk, (64, 128, 256, 512, 1024, 2048, MAX_GROUP))
        if not isinstance(self.k, int) or not 8 <= self.k <= self.chunk or self.k % 8:
            raise ValueError(
                f"ChunkTopK: k must be a multiple of 8 from 8 to chunk ({self.chunk}), got {shown(self.k)}"
            )
        require_in("ChunkTopK", "value_bits", self.value_bits, (16, 8, 4, 2))

    def layout(self, numel: int) -> PayloadLayout:
        """Fields of the payload of ``numel`` elements: ``scales`` (unless 16 bits), ``indices``, ``values``."""
        groups = -(-numel // self.chunk)
        entries = groups * self.k
        indices = ("indices", torch.uint8, packed12_nbytes(entries))
        if self.value_bits == 16:
            return PayloadLayout.of(indices, ("values", torch.bfloat16, entries))
        codes_nbytes = bitpack.packed_nbytes(entries, self.value_bits)
        return PayloadLayout.of(("scales", torch.float32, groups), indices, ("values", torch.uint8, codes_nbytes))

    def payload_nbytes(self, numel: int) -> int:
        return self.layout(numel).nbytes

    # ---------------------------------------------------------------- reference

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        layout = self.layout(numel)
        groups = values.new_zeros(-(-numel // self.chunk), self.chunk)
        groups.view(-1)[: values.numel()] = values
        magnitudes = groups.view(torch.int32) & MAGNITUDE  # ordered as integers, with inf and NaN above all others
        indices = magnitudes.sort(dim=1, descending=True, stable=True).indices[:, : self.k].sort(1).values
        entries = groups.gather(1, indices)
        scale = self.scale(entries)
        indices[scale.isnan()] = torch.arange(self.k, dtype=torch.int64, device=values.device)
        payload = layout.new(values.device)
        rows = self.rows(payload, layout)
        rows["indices"].copy_(pack12(indices))
        if self.value_bits == 16:
            rows["values"].copy_(entries)
            rows["values"].view(torch.int16)[scale.isnan()] = _NAN_BITS
        else:
            codes = quantize_torch(entries, scale[:, None], self.value_bits)
            codes[scale.isnan()] = 0
            rows["scales"].copy_(scale[:, None])
            rows["values"].copy_(bitpack.pack(codes.flatten(), self.value_bits).view_as(rows["values"]))
        return payload

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        rows = self.rows(payload, self.layout(numel))
        indices = unpack12(rows["indices"])
        if self.value_bits == 16:
            entries = rows["values"].float()
        else:
            codes = bitpack.unpack(rows["values"].flatten(), self.value_bits, indices.numel())
            entries = dequantize_torch(codes.view_as(indices), rows["scales"], self.value_bits)
        groups = entries.new_zeros(indices.shape[0], MAX_GROUP).scatter_(1, indices, entries)
        repeats = (indices.diff(dim=1) <= 0).any(1)  # or are in another order, which no encoder writes either
        groups[entries.isnan().any(1) | repeats | ~status_ok(payload)] = torch.nan
        return groups[:, : self.chunk].flatten()[:numel]  # no encoder writes an index beyond the group

    def rows(self, payload: torch.Tensor, layout: PayloadLayout) -> dict[str, torch.Tensor]:
        """The fields of payloads ``[..., nbytes]`` with a row per group, ``[..., groups, row]``."""
        widths = {"scales": 1, "indices": packed12_nbytes(self.k), "values": self.k * min(self.value_bits, 8) // 8}
        return {
            field.name: layout.view(payload, field.name).unflatten(-1, (-1, widths[field.name]))
            for field in layout.fields
        }

    def scale(self, entries: torch.Tensor) -> torch.Tensor:
        """Scales, fp32 ``[groups]``, of ``entries [groups, k]``; NaN for groups that must decode to NaN."""
        magnitudes = entries.abs()
        if self.value_bits == 2:
            scale = zero_below_normal_torch(pairwise_sum_torch(magnitudes) / self.k)
        elif self.value_bits == 16:
            scale = magnitudes.amax(1)  # not sent with bf16 values
        else:
            scale = absmax_scale_torch(magnitudes.amax(1), self.value_bits)
        return torch.where(scale.isfinite(), scale, torch.nan)

    # ---------------------------------------------------------------- host path and kernels

    host = on_first_use(_host)
    triton = on_first_use(_triton)
