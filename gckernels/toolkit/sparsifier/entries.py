"""The wire format of entries: the indices of the elements that are sent, ascending, and their values.

An index is cut in two. Its ``low`` lowest bits are packed one after the other. The bits above them are the number of a
*group* of ``2**low`` elements. A string of bits encodes the groups: a one for every entry and, behind the entries of
each group, a zero. Entry ``i`` in group ``h`` is bit ``i + h``, and ``k`` entries of ``numel`` elements take
``k + ceil(numel / 2**low)`` bits. This is the code of Elias (1974) and Fano (1971) for ascending sequences: with one
entry in 5 to 3000 elements it takes at most 0.7 bits per entry more than the least that is possible. The string
contains the number of entries. ``low`` follows from the density alone, see ``low_bits``.

Fields, each on a boundary of 16 bytes (``toolkit/payload.py``):

- ``highs``: the string, lowest bit first, as int32, ``[ceil((k + ceil(numel / 2**low)) / 32)]``;
- ``lows``: ``k`` integers of ``low`` bits (``toolkit/bitpack.py``), absent where ``low`` is 0;
- ``scales``: fp32, one for every 64 entries in a row; absent with values of 32 and 16 bits;
- ``values``: fp32, bf16, or codes of 8, 4 or 2 bits (``toolkit/linear.py``). With ``m = 2**(bits - 1) - 1`` the scale
  is the largest magnitude of its entries over ``m``, with 2 bits their mean magnitude (summed pairwise).

All bits behind the last entry are zero. A block of entries with inf or NaN among them, or whose mean magnitude
overflows, has a NaN scale and codes 0, and decodes to NaN.

A decoder trusts no bit of a payload. Groups ascend whatever the bits are. No encoder writes more than ``k`` ones, or an
entry that is not above the one before it in its group. A decoder makes NaN of the ``SPAN`` elements, counted from the
beginning of the chunk, in which it finds one of these. It passes over an entry outside the chunk.

Example: ``low=2, value_bits=4``, room for 3 entries of 12 elements, of which two are used, -7.0 at 1 and 2.25 at 9::

    highs   09 00 00 00    bits 1 0 0 1 0 0: one entry in group 0, none in group 1, one in group 2
    lows    05             1, 1
    scales  00 00 80 3F    1.0
    values  A1             -7 + 8, 2 + 8
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .. import bitpack
from ..linear import absmax_scale_torch, dequantize_torch, pairwise_sum_torch, quantize_torch, zero_below_normal_torch
from ..payload import PayloadLayout, store_floats

VALUE_BITS = (32, 16, 8, 4, 2)
BLOCK = 64
"""Entries that share a scale: half a bit each. Twice as many would save a quarter of a bit per entry, 2 % of the bytes,
and make the error of 4-bit values larger, by a seventh for normally distributed gradients, by half for heavy tails."""
SPAN = 2048
"""Elements that a damaged entry makes NaN, and that a decoder works on at a time."""
_MAX_LOW = 11  # a group lies in a span
_FLOATS = {32: torch.float32, 16: torch.bfloat16}


def low_bits(parts: int, whole: int) -> int:
    """The ``low`` from 0 to 11 with which ``parts`` entries of ``whole`` elements take the fewest bits.

    They take ``parts * (low + 1) + whole / 2**low`` bits: one more low bit costs ``parts`` and saves
    ``whole / 2**(low + 1)``.
    """
    return max(0, min((-(-whole // parts) - 1).bit_length() - 1, _MAX_LOW))


@dataclass(frozen=True)
class EntryFormat:
    """The format of entries with ``low`` low bits and values of ``value_bits`` bits (see the module's docstring)."""

    low: int
    value_bits: int

    def fields(self, numel: int, k: int) -> tuple[tuple[str, torch.dtype, int], ...]:
        """``(name, dtype, count)`` of the fields with room for ``k`` entries of ``numel`` elements."""
        highs = ("highs", torch.int32, -(-(k - (-numel // 2**self.low)) // 32))
        lows = ("lows", torch.uint8, bitpack.packed_nbytes(k, self.low))
        if self.value_bits in _FLOATS:
            return highs, lows, ("values", _FLOATS[self.value_bits], k)
        codes = ("values", torch.uint8, bitpack.packed_nbytes(k, self.value_bits))
        return highs, lows, ("scales", torch.float32, -(-k // BLOCK)), codes

    def layout(self, numel: int, k: int) -> PayloadLayout:
        """The layout of a payload with room for ``k`` entries of ``numel`` elements."""
        return _layout(self, numel, k)

    def write(self, indices: torch.Tensor, values: torch.Tensor, numel: int, k: int) -> torch.Tensor:
        """The payload, uint8 ``[nbytes]``, of entries: ascending int64 ``indices`` and fp32 ``values``, ``[count]``."""
        layout, count = self.layout(numel, k), indices.numel()
        payload = layout.new(values.device)
        string = torch.zeros(layout["highs"].count * 32, dtype=torch.int32, device=values.device)
        string[torch.arange(count, dtype=torch.int64, device=values.device) + (indices >> self.low)] = 1
        layout.view(payload, "highs").view(torch.uint8).copy_(bitpack.pack(string, 1))
        _store(layout.view(payload, "lows"), bitpack.pack(indices & (2**self.low - 1), self.low))
        if self.value_bits in _FLOATS:
            store_floats(layout.view(payload, "values")[:count], values)
        else:
            scales, codes = _quantize(values, self.value_bits)
            _store(layout.view(payload, "scales"), scales)
            _store(layout.view(payload, "values"), bitpack.pack(codes, self.value_bits))
        return payload

    def read(self, payload: torch.Tensor, numel: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(indices int64, values fp32, wrong bool)`` of all ones in a payload; no encoder writes a wrong one."""
        layout = self.layout(numel, k)
        highs = layout.view(payload, "highs").view(torch.uint8)
        places = bitpack.unpack(highs, 1, highs.numel() * 8).nonzero()[:, 0]
        numbers = torch.arange(places.numel(), dtype=torch.int64, device=payload.device)
        wrong, count = numbers >= k, min(places.numel(), k)
        indices = (places - numbers) << self.low
        indices[:count] |= bitpack.unpack(layout.view(payload, "lows"), self.low, k)[:count]
        wrong[1:] |= indices[1:] <= indices[:-1]
        stored = layout.view(payload, "values")
        if self.value_bits not in _FLOATS:
            scales = layout.view(payload, "scales").repeat_interleave(BLOCK)[:k]
            stored = dequantize_torch(bitpack.unpack(stored, self.value_bits, k), scales, self.value_bits)
        values = torch.zeros(places.numel(), dtype=torch.float32, device=payload.device)
        values[:count] = stored[:count]
        return indices, values, wrong


@functools.lru_cache(maxsize=65536)  # asked for several times in every step
def _layout(entries: EntryFormat, numel: int, k: int) -> PayloadLayout:
    return PayloadLayout.of(*entries.fields(numel, k))


def _store(field: torch.Tensor, values: torch.Tensor) -> None:
    """Store ``values`` at the beginning of a field."""
    field[: values.numel()] = values


def _quantize(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scales fp32 [blocks], codes int32 [count])`` of fp32 ``[count]``."""
    firsts = torch.arange(0, values.numel(), BLOCK, dtype=torch.int64, device=values.device)
    blocks = values.new_zeros(firsts.numel() * BLOCK)
    blocks[: values.numel()] = values
    blocks = blocks.view(-1, BLOCK)
    if bits == 2:
        sizes = (values.numel() - firsts).clamp(max=BLOCK)
        scales = zero_below_normal_torch(pairwise_sum_torch(blocks.abs()) / sizes)
    else:
        scales = absmax_scale_torch(blocks.abs().amax(1), bits)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = quantize_torch(blocks, scales[:, None], bits).where(scales.isfinite()[:, None], 0.0)
    return scales, codes.to(torch.int32).flatten()[: values.numel()]
