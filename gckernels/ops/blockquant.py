"""BlockQuant: signed linear quantisation to 8 or 4 bits, scaled by the largest magnitude of each block.

This is the quantiser of ZeRO++'s qgZ (Wang et al., arXiv:2306.10209, section 3.3) and of LoCo (Xie et al.,
arXiv:2407.04480), here with full-precision error feedback. Let ``m = 2**(bits - 1) - 1`` (127 or 7). A block's scale is
``max abs p / m``, rounded to ``scale_dtype``, or 0 if that is below the smallest normal fp32 number. The code of an
element is ``p`` times the scale's reciprocal, rounded to the nearest integer (ties to even), limited to ``-m .. m``
and stored with ``m + 1`` added.

Wire format (``Maps`` payload): scales, then codes of ``bits`` bits.
Size in bytes: ``16 + field(scale_dtype.itemsize * blocks) + field(n * bits / 8)``.

Example: ``BlockQuant(bits=4)``, ``p = [7, -3.6, 0.5, 0]``: scale 1, codes 15 4 8 8 (7, -4, 0, 0)::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 80 3F 00 .. 00      1.0
    bytes 32..47  4F 88 00 .. 00            codes, low nibble first
    decoded [7, -4, 0, 0], residual [0, 0.4, 0.5, 0]

Example: ``BlockQuant(scale_dtype='bfloat16')``, ``p = [-254, 63, 1]``: scale 2, and -127, 31.5 and 0.5 become -127, 32
and 0::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 40 00 .. 00            2.0 in bf16
    bytes 32..47  01 A0 80 00 .. 00         codes, each plus 128
    decoded [-254, 64, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit import linear
from ..toolkit.fields import as_dtype, require_block, require_in
from ..toolkit.quantizer import MapQuantizer, Maps


@register
@dataclass(frozen=True)
class BlockQuant(MapQuantizer):
    """8 or 4 bits per element and one scale per block (see the module's docstring).

    Attributes:
        bits: 8 or 4.
        block: elements per scale, a power of two from 32 to 16384.
        scale_dtype: ``torch.float32`` or ``torch.bfloat16``, or a name of one: ``"fp32"``, ``"bfloat16"``.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)
    maps = Maps(
        quantize=lambda values, stats, dither, C: linear.quantize_torch(values, stats[0], C.bits),
        dequantize=lambda codes, stats, C: linear.dequantize_torch(codes, stats[0], C.bits),
        statistic=linear.ABSMAX_SCALE,
    )

    bits: int = 8
    block: int = 256
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        require_in("BlockQuant", "bits", self.bits, (8, 4))
        require_block("BlockQuant", self.block, smallest=32, optional=False)
        object.__setattr__(self, "scale_dtype", as_dtype("BlockQuant: scale_dtype", self.scale_dtype))
        require_in("BlockQuant", "scale_dtype", self.scale_dtype, (torch.float32, torch.bfloat16))

    @property
    def stats_dtype(self) -> torch.dtype:  # type: ignore[override]  # a class attribute in the base
        return self.scale_dtype
