"""GradDrop: what exceeds a quantile of a sample, with error feedback.

Aji & Heafield, arXiv:1704.05021, section 3: the threshold that drops a fixed share of the entries is estimated
on a sample, for speed. Also in HiPress (SOSP'21).

The sample is one entry of every row of ``numel / 1024``, but of at most 100 entries, drawn by the seed
(``toolkit/sparsifier/keys.py``): all entries up to 2047, about 1 % from 102,400 on. What reaches the magnitude of rank
``k * sample / numel``, rounded up, is sent in the order of the indices, the first k of it where more than k do. The
paper's payload grows and shrinks; this one has its size, and where the threshold was too low, what is left out stays in
the residual. Inf and NaN go before all others. Zeros are not sent.

Wire format: that of ``toolkit/sparsifier``, with ``k = ceil(numel * ratio)``: header, then ``highs``, ``lows``,
``scales`` and ``values`` as in ``toolkit/sparsifier/entries.py``.

Example: ``GradDrop(ratio=0.5)``, ``p = [0, -3, 1, 0.5, 1, 1]``, hence k = 3. All of it is the sample, in which 1 has
rank 3, so 1, 2 and 4 are sent. Each is a group of its own (``low`` is 0)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  4A 00 00 00 00 .. 00                               bits 0 + 1, 1 + 2 and 2 + 4
    bytes 32..47  00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00    -3.0, 1.0, 1.0
    decoded [0, -3, 1, 0, 1, 0], residual [0, 0, 0, 0.5, 0, 1]
"""

from __future__ import annotations

from dataclasses import dataclass

from ..method import Traits
from ..registration import register
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Sampled


@register
@dataclass(frozen=True)
class GradDrop(Sparsifier):
    """What exceeds a sampled quantile, at most ``ceil(numel * ratio)`` entries (see the module's docstring).

    Attributes:
        ratio: share of the entries that is sent, above 0 and at most 1.
        value_bits: 32 (fp32), 16 (bf16), or 8, 4 or 2 bits of codes with a scale for every 64 entries.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True, stochastic=True)
    selection = Sampled()

    ratio: float = 0.01
    value_bits: int = 32
