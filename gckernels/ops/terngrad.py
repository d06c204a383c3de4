"""TernGrad: every element becomes 0 or plus or minus the largest magnitude, at random and unbiased.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017
(arXiv:1705.07878), section 3: let ``s = max abs p``. An element becomes ``sign(p) * s`` with the probability ``abs(p) /
s``, otherwise 0. The paper has one ``s`` per layer (here ``block=None``). The default is one ``s`` per block of 128
elements. It costs a quarter of a bit more per element, takes one pass over memory instead of two, and has much less
variance, because the largest of many magnitudes is far from most of them (``bench/training/convergence.py``).

``clip`` is the paper's gradient clipping (section 3.3, with the value 2.5). Magnitudes are first limited to ``clip *
sigma``, which lowers the variance and adds a bias. It is off by default, because the paper's convergence proof needs
unbiased gradients. Here ``sigma`` is the root mean square instead of the deviation from the mean: the mean of a
gradient is close to 0, and a gradient of equal elements, whose deviation is 0, would be clipped to 0. In the paper
workers also agree on the largest of their ``s``; here every payload has its own.

A block decodes to 0 if its ``s`` is below the smallest normal number. Other elements are rounded from ``p / s``.

Some systems call a linear quantiser between minimum and maximum TernGrad; here that is ``LinearQuant``.

Wire format (``Maps`` payload, 2 bits per element): 0 means ``-s``, 1 means 0, 2 means ``+s``.
Size in bytes: ``16 + field(4 * blocks) + field(n / 4)``.

Example: ``TernGrad()``, ``p = [2, -2, 0, 2]``, where rounding is not random: codes 2 0 1 2::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 00 40 00 .. 00      s = 2.0
    bytes 32..47  92 00 .. 00               codes, lowest bits first
    decoded [2, -2, 0, 2]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.fields import require_block, require_float
from ..toolkit.numeric import reciprocal_torch, small_to_fp32_torch, sqrt_torch
from ..toolkit.quantizer import LARGEST, SUM, MapQuantizer, Maps, Shortcut, Statistic
from ..toolkit.quantizer.statistics import (
    LARGEST_MAGNITUDE,
    plain_squares_suffice,
    root_of_squares,
    scaled_squares,
)
from ..toolkit.random import rounded_at_random


def _quantize(values, stats, dither, C):
    level = values * reciprocal_torch(stats[0])
    if C.clip is not None:
        level = level.clamp(-1.0, 1.0)
    return rounded_at_random(level, dither, 2)  # 1 + 2**-22, by rounding errors, counts as 1


def _clipped(partials, count, C):
    return _limited(partials[0], root_of_squares(partials[1], partials[2], partials[3]), count, C)


def _quickly_clipped(partials, count, C):
    return _limited(partials[0], sqrt_torch(partials[1]), count, C)


def _limited(largest, norm, count, C):
    limit = norm / sqrt_torch(count) * C.clip
    return (torch.where(limit < largest, limit, largest),)


_PLAIN = Maps(
    quantize=_quantize,
    dequantize=lambda codes, stats, C: small_to_fp32_torch(codes, 1) * stats[0],
    statistic=LARGEST_MAGNITUDE,
    dither_base=129,  # -1, 0 and 1 become the codes 0, 1 and 2
)
_CLIPPED = Maps(
    quantize=_PLAIN.quantize,
    dequantize=_PLAIN.dequantize,
    statistic=Statistic(
        (LARGEST, SUM, SUM, SUM),
        lambda values, C: (values.abs(), *scaled_squares(values, C)),
        _clipped,
        shortcut=Shortcut(
            Statistic((LARGEST, SUM), lambda values, C: (values.abs(), values * values), _quickly_clipped),
            holds=lambda partials, C: plain_squares_suffice(partials[1]),
        ),
    ),
    dither_base=_PLAIN.dither_base,
)


@register
@dataclass(frozen=True)
class TernGrad(MapQuantizer):
    """2 bits per element and one fp32 scale per block (see the module's docstring).

    Attributes:
        clip: limit of the magnitudes, as a multiple of the root mean square, a float from 0.1; ``None`` for no limit.
        block: elements per scale, a power of two from 128 to 16384; ``None`` for one scale for the whole unit, as in
            the paper.

    Raises:
        ValueError: for any other value.
    """

    bits: ClassVar[int] = 2

    clip: float | None = None
    block: int | None = 128

    def __post_init__(self) -> None:
        if self.clip is not None:
            require_float("TernGrad", "clip", self.clip, 0.1, math.inf)
        require_block("TernGrad", self.block, smallest=128, optional=True)

    @property
    def maps(self) -> Maps:  # type: ignore[override]  # a class attribute in the base
        return _PLAIN if self.clip is None else _CLIPPED

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(stochastic=True, unbiased=self.clip is None)
