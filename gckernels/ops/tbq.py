"""TBQ: threshold binary quantisation; elements that reach a threshold become the threshold, with error feedback.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, as a dense payload:
the paper sends the indices of the elements that reach the threshold; HiPress (Bai et al., SOSP 2021) sends 2 bits for
every element, as here. ``p >= tau`` becomes ``tau``, ``p <= -tau`` becomes ``-tau``, other elements become 0, and the
rest stays in the residual. There is no statistic, so encoding takes one pass over memory.

``tau`` is in units of the gradient and depends on the model: at most ``tau`` of an element is sent per step, and small
values wait until they have accumulated to ``tau``. Too small a ``tau`` is worse than too large a one: residuals then
grow without bound, and gradients arrive long after they were computed. Choose it well above the usual magnitude.

Wire format (``Maps`` payload, 2 bits per element, no statistics): 0 means ``-tau``, 1 means 0, 2 means ``+tau``, and 3
means NaN, for elements that are not finite.
Size in bytes: ``16 + field(n / 4)``.

Example: ``TBQ(tau=0.5)``, ``p = [0.75, -0.5, 0.25, 2]``: codes 2 0 1 2::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  92 00 .. 00               codes, lowest bits first
    decoded [0.5, -0.5, 0, 0.5], residual [0.25, 0, 0.25, 1.5]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.fields import require_float
from ..toolkit.numeric import small_to_fp32_torch
from ..toolkit.quantizer import MapQuantizer, Maps


def _quantize(values, stats, dither, C):
    code = torch.where(values >= C.tau, 2, torch.where(values <= -C.tau, 0, 1))
    return torch.where(values.isfinite(), code, 3)


def _dequantize(codes, stats, C):
    level = small_to_fp32_torch(codes, 1)
    return torch.where(level == 2.0, torch.nan, level * C.tau)


@register
@dataclass(frozen=True)
class TBQ(MapQuantizer):
    """2 bits per element (see the module's docstring).

    Attributes:
        tau: the threshold and the magnitude that is sent, in units of the gradient; a float from 1e-30 to below 1e30.

    Raises:
        ValueError: for any other ``tau``.
    """

    traits = Traits(needs_feedback=True)
    bits: ClassVar[int] = 2
    block: ClassVar[None] = None
    maps = Maps(quantize=_quantize, dequantize=_dequantize)

    tau: float = 0.05

    def __post_init__(self) -> None:
        require_float("TBQ", "tau", self.tau, 1e-30, 1e30)
