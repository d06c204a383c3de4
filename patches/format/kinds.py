"""Kinds of elements: where a bit pattern has its exponent, and the order of bit patterns.

An element is 1 or 2 bytes. Patterns of a floating-point kind are ordered by value: that of ``-0`` is one step below
that of ``+0``, and NaNs come behind the infinities. All patterns differ, so a distance says everything about a change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ElementKind:
    """The form of an element.

    Attributes:
        nbytes: bytes of an element, 1 or 2.
        shift: bits of the mantissa, which are the lowest ones.
        exponent_bits: bits of the exponent above them; 0 where patterns are integers, which have one class.
    """

    nbytes: int
    shift: int
    exponent_bits: int

    @property
    def bits_dtype(self) -> torch.dtype:
        """The dtype of tensors that hold patterns."""
        return torch.int16 if self.nbytes == 2 else torch.uint8

    @property
    def patterns(self) -> int:
        """The number of patterns."""
        return 1 << 8 * self.nbytes

    def classes(self, patterns: torch.Tensor) -> torch.Tensor:
        """The exponents of patterns, both int64."""
        return (patterns >> self.shift) & ((1 << self.exponent_bits) - 1)

    def order(self, patterns: torch.Tensor) -> torch.Tensor:
        """The places of patterns in their order, from ``-patterns / 2`` on; of integers the patterns themselves."""
        sign = self.patterns // 2
        return torch.where(patterns >= sign, sign - 1 - patterns, patterns) if self.exponent_bits else patterns

    def codes(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The steps from old patterns to other ones, int64, as codes: 0 is one step up, 1 one down, 2 two up."""
        half = self.patterns // 2
        steps = (self.order(new) - self.order(old) + half) % self.patterns - half
        return torch.where(steps > 0, 2 * steps - 2, -2 * steps - 1)

    def moved(self, old: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """The patterns that lie as many steps from old patterns as codes say."""
        half = self.patterns // 2
        steps = torch.where(codes % 2 == 0, codes // 2 + 1, -(codes + 1) // 2)
        places = (self.order(old) + steps + half) % self.patterns - half
        return torch.where(places < 0, half - 1 - places, places) if self.exponent_bits else places % self.patterns


BF16, FP16 = ElementKind(2, 7, 8), ElementKind(2, 10, 5)
E4M3, E5M2 = ElementKind(1, 3, 4), ElementKind(1, 2, 5)
BYTES = ElementKind(1, 8, 0)
KINDS = (BF16, FP16, E4M3, E5M2, BYTES)
"""All kinds, in the order in which a layout has their tensors."""
_OF_DTYPES = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e4m3fnuz: E4M3,
    torch.float8_e5m2: E5M2,
    torch.float8_e5m2fnuz: E5M2,
}


def kind_of_dtype(dtype: torch.dtype) -> ElementKind:
    """The kind of a dtype's elements. Types without a kind of their own are taken byte by byte."""
    return _OF_DTYPES.get(dtype, BYTES)


def patterns_of(bits: torch.Tensor) -> torch.Tensor:
    """Patterns as int64, of bits as int16 or uint8."""
    return bits.to(torch.int64) & (0xFFFF if bits.dtype == torch.int16 else 0xFF)
