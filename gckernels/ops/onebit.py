"""OneBit: every element becomes the mean of the elements with the same sign, with error feedback.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014, section 3, with the threshold 0 that the paper recommends. The two reconstruction values are
the means of the elements that they replace, which minimises the squared error. The paper has a pair of means for every
column of a weight matrix. A unit has no columns, so each block of 128 elements has a pair, which takes one pass over
memory. With ``block=None`` the whole unit has one pair: this needs half a bit less per element and two passes, and is
less accurate, because magnitudes differ by orders from row to row (``bench/training/convergence.py``).

Wire format (``Maps`` payload, 1 bit per element): the mean of the elements >= 0 of every block, then the mean of the
elements < 0 of every block, each 0 if there are none; bit 1 means the former.
Size in bytes: ``16 + field(8 * blocks) + field(n / 8)``.

Example: ``OneBit()``, ``p = [3, -1, 0, -4]``, one block. The means are 1.5 and -2.5, the bits are 1 0 1 0 (lowest
first)::

    bytes  0..15  47 4B 43 31 00 .. 00                  status word
    bytes 16..31  00 00 C0 3F 00 00 20 C0 00 .. 00      1.5, -2.5
    bytes 32..47  05 00 .. 00                           bits
    decoded [1.5, -2.5, 1.5, -2.5], residual [1.5, 1.5, -1.5, -1.5]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.fields import require_block
from ..toolkit.quantizer import SUM, MapQuantizer, Maps, Statistic


# Both signs are counted: subtracting one count from the number of elements would be wrong for units of more than 2**24
# elements, whose counts fp32 rounds.
def _terms(values, C):
    upper = values >= 0
    # NaN makes both sums NaN
    return values.clamp(min=0.0), values.clamp(max=0.0), upper.to(torch.float32), (~upper).to(torch.float32)


def _means(partials, count, C):
    above, below, num_above, num_below = partials[0], partials[1], partials[2], partials[3]
    return above / num_above.clamp(min=1.0), below / num_below.clamp(min=1.0)


@register
@dataclass(frozen=True)
class OneBit(MapQuantizer):
    """1 bit per element and two fp32 means per block (see the module's docstring).

    Attributes:
        block: elements per pair of means, a power of two from 128 to 16384; ``None`` for one pair for the whole unit.

    Raises:
        ValueError: for any other ``block``.
    """

    traits = Traits(needs_feedback=True)
    bits: ClassVar[int] = 1
    maps = Maps(
        quantize=lambda values, stats, dither, C: values >= 0,
        dequantize=lambda codes, stats, C: torch.where(codes == 1, stats[0], stats[1]),
        statistic=Statistic((SUM, SUM, SUM, SUM), _terms, _means, size=2),
    )

    block: int | None = 128

    def __post_init__(self) -> None:
        require_block("OneBit", self.block, smallest=128, optional=True)
