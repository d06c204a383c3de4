"""EFSignSGD: the sign of every element times a mean of the magnitudes, with error feedback.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019
(arXiv:1901.09847), Algorithm 1. The paper has one scale per layer (here ``block=None``). The default is one scale per
block of 128 elements. It costs a quarter of a bit more per element, takes one pass over memory instead of two, and is
more accurate, because the magnitudes of a layer differ by orders from row to row (``bench/training/convergence.py``).

The scale with ``magnitude="mean"`` is the mean magnitude, as in the paper: no other has so small an error. A decoded
block is then shorter than the original, even along its direction; the residual keeps the rest. With
``magnitude="projection"`` the scale is the sum of squares over the sum of magnitudes, and a decoded block has the
length of the original in that direction (Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS
2021, arXiv:2105.08339, section 3, without the rotation). This is for residuals that decay, with which shorter blocks
would be smaller steps. If the squares of a block leave the range of fp32, it has the mean magnitude.

Wire format (``Maps`` payload, 1 bit per element): bit 1 means ``+scale``, also for zeros, bit 0 means ``-scale``.
Size in bytes: ``16 + field(4 * blocks) + field(n / 8)``.

Example: ``EFSignSGD()``, ``p = [3, -1, 0, -4]``, one block. The mean magnitude is 2, the bits are 1 0 1 0 (lowest
first)::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 00 40 00 .. 00      2.0
    bytes 32..47  05 00 .. 00               bits
    decoded [2, -2, 2, -2], residual [1, 1, -2, -2]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.fields import require_block, require_in
from ..toolkit.numeric import negated_torch
from ..toolkit.quantizer import SUM, MapQuantizer, Maps, Statistic
from ..toolkit.quantizer.statistics import MEAN_MAGNITUDE, plain_squares_suffice


def _projection(partials, count, C):
    magnitudes, squares = partials[0], partials[1]
    return (torch.where(plain_squares_suffice(squares), squares / magnitudes, magnitudes / count),)


_MEAN = Maps(
    quantize=lambda values, stats, dither, C: values >= 0,
    dequantize=lambda codes, stats, C: negated_torch(stats[0], codes ^ 1),
    statistic=MEAN_MAGNITUDE,
)
_PROJECTION = replace(
    _MEAN, statistic=Statistic((SUM, SUM), lambda values, C: (values.abs(), values * values), _projection)
)


@register
@dataclass(frozen=True)
class EFSignSGD(MapQuantizer):
    """1 bit per element and one fp32 scale per block (see the module's docstring).

    Attributes:
        block: elements per scale, a power of two from 128 to 16384; ``None`` for one scale for the whole unit, as in
            the paper.
        magnitude: ``"mean"`` or ``"projection"``.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)
    bits: ClassVar[int] = 1

    block: int | None = 128
    magnitude: str = "mean"

    def __post_init__(self) -> None:
        require_block("EFSignSGD", self.block, smallest=128, optional=True)
        require_in("EFSignSGD", "magnitude", self.magnitude, ("mean", "projection"))

    @property
    def maps(self) -> Maps:  # type: ignore[override]  # a class attribute in the base
        return _MEAN if self.magnitude == "mean" else _PROJECTION
