"""QSGD: magnitudes rounded to one of a few multiples of each bucket's norm, at random and unbiased.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017
(arXiv:1610.02132), section 3.1, in buckets as in section 4. Let ``x = abs(p) / norm * levels``. An element becomes one
of the two integers around ``x``, the upper one with the probability ``x - floor(x)``, times ``norm / levels``, with its
sign. The norm is Euclidean, as in the paper's theory; the paper's experiments scale by the largest magnitude. Codes
have a fixed width; the paper also has a variable width (Elias coding).

The norm is computed without overflow or underflow of the squares. A bucket whose norm exceeds fp32 decodes to NaN. A
bucket decodes to 0 if one level of it, ``norm / levels``, is below the smallest normal number.

Wire format (``Maps`` payload): the norm of every bucket, fp32; codes of ``ceil(log2(levels + 1)) + 1`` bits, the level
with the sign bit above it. A level ``l`` decodes to ``l * w * norm``, where ``w`` is the fp32 number next to
``1 / levels`` and every product is rounded.
Size in bytes: ``16 + field(4 * ceil(n / bucket)) + field(n * (ceil(log2(levels + 1)) + 1) / 8)``.

Example: ``QSGD(levels=4)``, 4 bits, ``p = [6, -4, 2, -2, 2, 0]``, where rounding is not random: the norm is 8, the
levels are 3, 2, 1, 1, 1 and 0::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 00 41 00 .. 00      8.0
    bytes 32..47  A3 91 01 00 .. 00         codes 3 10 1 9 1 0, low nibble first
    decoded [6, -4, 2, -2, 2, 0]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.constants import Constants
from ..toolkit.fields import require_block, require_in
from ..toolkit.numeric import reciprocal_torch, small_to_fp32_torch
from ..toolkit.quantizer import MapQuantizer, Maps
from ..toolkit.quantizer.statistics import NORM
from ..toolkit.random import rounded_at_random


def _quantize(values, stats, dither, C):
    x = values.abs() * reciprocal_torch(stats[0] * C.weight)
    # x exceeds the levels by rounding errors of at most 2**-20 of them; up to 7 levels, that is less than rounding sees
    if C.levels > 7:
        x = x.clamp(max=C.levels)
    return rounded_at_random(x, dither, C.bits - 1) | ((values.view(torch.int32) >> (32 - C.bits)) & C.sign)


def _dequantize(codes, stats, C):
    level = small_to_fp32_torch(codes & (C.sign - 1))
    size = (level * C.weight * stats[0]).view(torch.int32)
    return (size | ((codes & C.sign) << (32 - C.bits))).view(torch.float32)


@register
@dataclass(frozen=True)
class QSGD(MapQuantizer):
    """2 to 8 bits per element and one fp32 norm per bucket (see the module's docstring).

    Attributes:
        levels: number of levels above 0, from 1 to 127.
        bucket: elements per norm, a power of two from 32 to 16384. The paper's experiments use 512. The variance grows
            with the square root of the bucket, and 128 costs 0.2 bits more per element.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(stochastic=True, unbiased=True)
    maps = Maps(quantize=_quantize, dequantize=_dequantize, statistic=NORM)

    levels: int = 7
    bucket: int = 128

    def __post_init__(self) -> None:
        require_in("QSGD", "levels", self.levels, range(1, 128))
        require_block("QSGD", self.bucket, smallest=32, optional=False, field="bucket")

    @property
    def bits(self) -> int:
        return self.levels.bit_length() + 1

    @property
    def block(self) -> int:
        return self.bucket

    @functools.cached_property
    def constants(self) -> Constants:
        sign = 2 ** (self.bits - 1)
        return Constants(bits=self.bits, block=self.block, levels=self.levels, sign=sign, weight=1 / self.levels)
