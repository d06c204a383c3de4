"""LinearQuant: unsigned linear quantisation between minimum and maximum.

HiPress (Bai et al., SOSP 2021) ships it as its TernGrad; with 8 bits it is the ByteGrad of Bagua (Gan et al.,
arXiv:2107.01499). Let ``m = 2**bits - 1``. The code of an element is ``(p - min) / (max - min) * m``, rounded to the
nearest integer (ties to even) or, if ``stochastic``, to one of the two neighbouring integers at random and unbiased.
HiPress adds 1e-8 to the range and so loses small gradients. Here a range below 2**-125 counts as 0, and every element
becomes the minimum. Ranges that exceed fp32 do not overflow, because the computation uses halves of all values.

A code ``c`` decodes to ``min * (w * (m - c)) + max * (w * c)``, where ``w`` is the fp32 number next to ``1 / m`` and
every operation is rounded. Because ``w * m`` rounds to 1, code 0 is exactly the minimum and code ``m`` exactly the
maximum, and equal elements come back unchanged. The largest element gets the code ``m``. With stochastic rounding it
may get ``m - 1``, because the reciprocal of the range is rounded, with a probability below the resolution of the random
numbers.

Wire format (``Maps`` payload): the minimum of every block, the maximum of every block, codes of ``bits`` bits.
Size in bytes: ``16 + field(8 * blocks) + field(n * bits / 8)``.

Example: ``LinearQuant(bits=2)``, ``p = [-1, 2, 0.375, 0.75]``, one block. The step is 1, the levels are 0, 3, 1.375 and
1.75::

    bytes  0..15  47 4B 43 31 00 .. 00                  status word
    bytes 16..31  00 00 80 BF 00 00 00 40 00 .. 00      -1.0, 2.0
    bytes 32..47  9C 00 .. 00                           codes 0 3 1 2, lowest bits first
    decoded [-1, 2, 0, 1], residual [0, 0, 0.375, -0.25]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.constants import Constants
from ..toolkit.fields import require_block, require_in
from ..toolkit.numeric import reciprocal_torch, rounded_code_torch, small_to_fp32_torch
from ..toolkit.quantizer import MAX, MIN, MapQuantizer, Maps, Statistic
from ..toolkit.random import rounded_at_random


def _quantize(values, stats, dither, C):
    low, high = stats[0] * 0.5, stats[1] * 0.5
    level = (values * 0.5 - low) * reciprocal_torch(high - low) * C.largest
    # a level exceeds the largest at most by a rounding error, 2**-21 of it, which disappears where it is rounded to
    # nearest, and below 8 bits where it is rounded at random
    if C.stochastic and C.bits < 8:
        return rounded_at_random(level, dither, C.bits)
    if C.stochastic:  # only integers up to 127 are rounded to
        # the integer below the level; or one less, whose distance of 1 is then added
        shifted = (level - 0.5) + 1.5 * 2.0**23
        fraction = level - (shifted - 1.5 * 2.0**23)
        return ((shifted.view(torch.int32) & C.largest) + rounded_at_random(fraction, dither, 1)).clamp(max=C.largest)
    return rounded_code_torch(level, 0, C.bits)


def _dequantize(codes, stats, C):
    level = small_to_fp32_torch(codes)
    return stats[0] * ((C.largest - level) * C.weight) + stats[1] * (level * C.weight)


@register
@dataclass(frozen=True)
class LinearQuant(MapQuantizer):
    """``bits`` bits per element, and minimum and maximum of each block (see the module's docstring).

    Attributes:
        bits: 1, 2, 4 or 8.
        stochastic: whether to round at random and unbiased; otherwise to nearest, which needs error feedback.
        block: elements per minimum and maximum, a power of two from 128 to 16384; ``None`` for the whole unit.

    Raises:
        ValueError: for any other value.
    """

    maps = Maps(
        quantize=_quantize,
        dequantize=_dequantize,
        statistic=Statistic(
            (MIN, MAX),
            lambda values, C: (values, values),
            lambda partials, count, C: partials,
            size=2,
        ),
    )

    bits: int = 8
    stochastic: bool = False
    block: int | None = None

    def __post_init__(self) -> None:
        require_in("LinearQuant", "bits", self.bits, (1, 2, 4, 8))
        require_in("LinearQuant", "stochastic", self.stochastic, (False, True))
        require_block("LinearQuant", self.block, smallest=128, optional=True)

    @functools.cached_property
    def constants(self) -> Constants:
        largest = 2**self.bits - 1
        return Constants(stochastic=self.stochastic, bits=self.bits, largest=largest, weight=1 / largest)

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(needs_feedback=not self.stochastic, stochastic=self.stochastic, unbiased=self.stochastic)
