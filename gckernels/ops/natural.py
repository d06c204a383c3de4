"""Natural: magnitudes rounded to one of the two neighbouring powers of two, at random and unbiased.

Horváth et al., "Natural Compression for Distributed Deep Learning" (arXiv:1905.10988), section 2: if ``2**e`` is the
power of two below ``abs(p)``, the upper neighbour is taken with the probability ``abs(p) / 2**e - 1``, the fraction in
the mantissa. The paper sends 9 bits, the sign and fp32's 8 bits of exponent. Here the exponent has 7 bits, for 2**-94
to 2**31, so that a code fits a byte. Magnitudes below 2**-94 become 0 or 2**-94, also unbiased. Magnitudes above 2**31
decode to NaN, like inf and NaN: as with an overflow of fp16, a loss scaler notices and skips the step.

Wire format (``Maps`` payload, a byte per element, no statistics): the lowest 7 bits are 0 for zero, ``e`` from 1 to 126
for ``2**(e - 95)``, and 127 for NaN; the highest bit is the sign (1: negative).
Size in bytes: ``16 + field(n)``.

Example: ``Natural()``, ``p = [1, -0.25, 0, 2**31]``, where rounding is not random: ``e`` is 95, 93, 0 and 126::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  5F DD 00 7E 00 .. 00      codes
    decoded [1, -0.25, 0, 2**31]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.quantizer import MapQuantizer, Maps

# 2**-32 turns the exponent of fp32 into that of a code: 2**-94 becomes the smallest normal number, whose exponent is 1.
# Smaller magnitudes become subnormal, with 0 in the place of the exponent and their part of 2**-94 in the mantissa.


def _quantize(values, stats, dither, C):
    size = values.abs() * 2.0**-32
    # the draw in the highest 16 bits of a mantissa, and half of the lowest of these: the sum carries into the exponent
    # with the probability of the fraction, and not if that is 0. The 128 of the dither would be the highest bit.
    carried = size.view(torch.int32) + (dither.view(torch.int32) << 7) + (64 - 2**31)
    exponent = torch.where(size <= 0.5, carried >> 23, 127)
    return exponent | ((values.view(torch.int32) >> 24) & 128)


def _dequantize(codes, stats, C):
    # the sign and the exponent in their places; the exponent is then 32 too small, but 0 is the number 0
    value = (((codes & 127) << 23) | ((codes & 128) << 24)).view(torch.float32) * 2.0**32
    return torch.where((codes & 127) == 127, torch.nan, value)


@register
@dataclass(frozen=True)
class Natural(MapQuantizer):
    """8 bits per element (see the module's docstring)."""

    traits = Traits(stochastic=True, unbiased=True)
    bits: ClassVar[int] = 8
    block: ClassVar[None] = None
    maps = Maps(quantize=_quantize, dequantize=_dequantize)
