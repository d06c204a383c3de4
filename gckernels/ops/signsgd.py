"""SignSGD: the sign of every element; several payloads merge to the sign of the majority.

Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018 (arXiv:1802.04434), Algorithm 1
with the majority vote of Algorithm 3. The result of a synchronisation is not a mean but a vector of +1, -1 and, for
tied votes, 0. So the learning rate must be that of a sign method, and ``scale`` has no influence.

One bit cannot represent 0, so the bit of a zero is drawn at random from the seed, with equal probabilities. Zeros, and
ties of a first phase that a second phase encodes again, therefore cause no drift; most implementations send +1 for
them.

There is no scale that could carry inf and NaN, so every 4096 elements have a statistic: 0, or NaN if one of them is not
finite; then all of them decode to NaN. Error feedback is not part of the method. With a residual, the residual is the
gradient minus the decoded signs.

Wire format (``Maps`` payload, 1 bit per element): a bf16 per 4096 elements, 0 or NaN; bit 1 means +1, bit 0 means -1.
Size in bytes: ``16 + field(2 * ceil(n / 4096)) + field(n / 8)``.

Example: ``SignSGD()``, ``p = [3, -1, -0.5, 0.25]``: the bits are 1 0 0 1 (lowest first)::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 00 .. 00            0.0 in bf16
    bytes 32..47  09 00 .. 00               bits
    decoded [1, -1, -1, 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.quantizer import LARGEST, MapQuantizer, Maps, Statistic
from ..toolkit.quantizer.statistics import MAGNITUDE


def _majority(total, scale, C):
    one = torch.where(total > 0, 1.0, -1.0).to(torch.float32)
    return torch.where((total > 0) | (total < 0), one, total)  # 0 and NaN stay unchanged


MAJORITY_VOTE = Maps(
    quantize=lambda values, stats, dither, C: (values > 0) | ((values == 0) & (dither < 128.5)),
    dequantize=lambda codes, stats, C: torch.where(codes == 1, 1.0, -1.0).to(torch.float32) + stats[0],
    statistic=Statistic((LARGEST,), MAGNITUDE, lambda partials, count, C: (partials[0] * 0.0,)),
    merge=_majority,
    surety=lambda values, C: values.abs(),
)


@register
@dataclass(frozen=True)
class SignSGD(MapQuantizer):
    """1 bit per element, and 2 bytes per 4096 elements (see the module's docstring)."""

    traits = Traits(stochastic=True, averages=False)
    stats_dtype = torch.bfloat16
    bits: ClassVar[int] = 1
    block: ClassVar[int] = 4096
    maps = MAJORITY_VOTE
