"""SigNUM: SignSGD of a momentum that every rank keeps of its own gradient.

Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018 (arXiv:1802.04434), Algorithm 2
with the majority vote of Algorithm 3. The momentum ``m = beta * m + (1 - beta) * g`` takes the place of error
feedback's residual: it is the ``residual`` argument, zeros in the first step, and the new ``m`` is encoded. A block
with inf or NaN keeps its old momentum, because a loss scaler skips that step. Without the argument the method is
``SignSGD``. The owner of a shard also encodes with ``SignSGD``.

Wire format: that of ``SignSGD``.
Size in bytes: ``16 + field(2 * ceil(n / 4096)) + field(n / 8)``.

Example: ``SigNUM(beta=0.5)``, first step, ``g = [3, -1, -0.5, 0.25]``: the bits are 1 0 0 1 (lowest first)::

    bytes  0..15  47 4B 43 31 00 .. 00      status word
    bytes 16..31  00 00 00 .. 00            0.0 in bf16
    bytes 32..47  09 00 .. 00               bits
    decoded [1, -1, -1, 1], residual (the momentum) [1.5, -0.5, -0.25, 0.125]
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.constants import Constants
from ..toolkit.fields import require_float
from .signsgd import MAJORITY_VOTE, SignSGD

_OF_SHARD = SignSGD()


@register
@dataclass(frozen=True)
class SigNUM(SignSGD):
    """1 bit per element, and 2 bytes per 4096 elements (see the module's docstring).

    Attributes:
        beta: factor on the momentum in every step, a float from 0.0 to below 1.0.

    Raises:
        ValueError: for any other ``beta``.
    """

    traits = Traits(needs_feedback=True, stochastic=True, conserves=False, averages=False)
    maps = dataclasses.replace(
        MAJORITY_VOTE,
        accumulate=lambda grad, residual, C: residual * C.beta + grad * C.gain,
        keep=lambda values, decoded, C: torch.where(decoded == decoded, values, decoded),
    )

    beta: float = 0.9

    def __post_init__(self) -> None:
        require_float("SigNUM", "beta", self.beta, 0.0, 1.0)

    @property
    def shard_compressor(self) -> SignSGD:
        return _OF_SHARD

    @functools.cached_property
    def constants(self) -> Constants:
        return Constants(bits=self.bits, block=self.block, beta=self.beta, gain=1.0 - self.beta)
