"""BlockFP8: 8-bit floating point, scaled by the largest magnitude of each block.

This is the quantiser of torchft's and LoongForge's compressed reductions, here with full-precision error feedback. The
formats are those of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), section 3: e4m3 (3 bits of
mantissa, largest number 448) and e5m2 (2 bits of mantissa, largest number 57344). A block's scale is
``max abs p / largest``, so that the largest magnitude becomes the largest number of the format. An element becomes
``p`` times the scale's reciprocal, rounded to the nearest number of the format (ties to even, limited to the largest).
GPUs that have instructions for the conversion use them, all other devices integers, with the same bytes. A block whose
scale is below the smallest normal fp32 number becomes zeros. Encoders never write codes of inf or NaN.

Wire format (``Maps`` payload): a scale per block, fp32; a byte per element, in the format.
Size in bytes: ``16 + field(4 * blocks) + field(n)``.

Example: ``BlockFP8()``, e4m3, ``p = [-896, 2, 0.0625, 0]``: the scale is 2, the values are -448, 1, 2**-5 and 0::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 00 40 00 .. 00      2.0
    bytes 32..47  FE 38 10 00 .. 00         codes
    decoded [-896, 2, 0.0625, 0], residual [0, 0, 0, 0]

Example: ``BlockFP8(format='e5m2')``, ``p = [57344, -1.125, 2**-17, 0]``: the scale is 1. The first value is the largest
number. The next two are halfway between two numbers and become the even ones::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 80 3F 00 .. 00      1.0
    bytes 32..47  7B BC 00 00 00 .. 00      codes
    decoded [57344, -1, 0, 0]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl

from ..compressor import Traits
from ..registration import register
from ..toolkit import fp8
from ..toolkit.constants import Constants
from ..toolkit.fields import require_block, require_in
from ..toolkit.numeric import reciprocal, reciprocal_torch
from ..toolkit.quantizer import LARGEST, Dual, MapQuantizer, Maps, Statistic
from ..toolkit.quantizer.statistics import MAGNITUDE


def _quantize(values, stats, dither, C):
    return fp8.encode(values * reciprocal_torch(stats[0]), C.mantissa, C.bias, C.largest)


def _dequantize(codes, stats, C):
    return fp8.decode(codes, C.mantissa, C.bias) * stats[0]


@triton.jit
def quantize_by_instruction(values, stats, dither, C: tl.constexpr):
    """The codes, as int32, of a GPU that converts fp8."""
    return fp8.encode_by_instruction(values * reciprocal(stats[0]), C.mantissa)


@triton.jit
def dequantize_by_instruction(codes, stats, C: tl.constexpr):
    """The values of codes, of a GPU that converts fp8."""
    return fp8.decode_by_instruction(codes, C.mantissa) * stats[0]


@register
@dataclass(frozen=True)
class BlockFP8(MapQuantizer):
    """8 bits per element and one fp32 scale per block (see the module's docstring).

    Attributes:
        format: ``"e4m3"`` or ``"e5m2"``.
        block: elements per scale, a power of two from 32 to 16384.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)
    bits: ClassVar[int] = 8
    maps = Maps(
        quantize=Dual(_quantize, quantize_by_instruction, capability=fp8.CAPABILITY),
        dequantize=Dual(_dequantize, dequantize_by_instruction, capability=fp8.CAPABILITY),
        statistic=Statistic((LARGEST,), MAGNITUDE, lambda partials, count, C: (partials[0] / C.largest,)),
    )

    format: str = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        require_in("BlockFP8", "format", self.format, fp8.FORMATS)
        require_block("BlockFP8", self.block, smallest=32, optional=False)

    @functools.cached_property
    def constants(self) -> Constants:
        mantissa, bias, largest = fp8.FORMATS[self.format]
        return Constants(bits=self.bits, block=self.block, mantissa=mantissa, bias=bias, largest=largest)
