"""GradDrop: the entries that exceed a quantile of a sample, with error feedback.

Aji & Heafield, arXiv:1704.05021, section 3: the threshold that drops a fixed share of the entries is estimated
on a sample, for speed. HiPress (SOSP'21) has it as well.

The sample has one entry, drawn by the seed (``toolkit/sparsifier/keys.py``), of every ``numel / 1024`` entries or, from
102,400 elements on, of every 100: all entries up to 2047 elements, about 1 % from 102,400 on. The threshold is the
magnitude of rank ``k * sample / numel``, rounded up. Entries that reach it are sent in the order of their indices; if
they are more than k, only the first k. The paper's payload grows and shrinks. This one has a fixed size, and entries
that do not fit stay in the residual. Inf and NaN take precedence. Zeros are not sent.

Wire format: that of ``toolkit/sparsifier``, with ``k = ceil(numel * ratio)``: header, then ``highs``, ``lows``,
``scales`` and ``values`` as in ``toolkit/sparsifier/entries.py``.

Example: ``GradDrop(ratio=0.5)``, ``p = [0, -3, 1, 0.5, 1, 1]``, hence k = 3. The sample is all of ``p``, where 1 has
rank 3, so entries 1, 2 and 4 are sent. Groups have one element (``low`` is 0)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  4A 00 00 00 00 .. 00                               bits 0 + 1, 1 + 2 and 2 + 4
    bytes 32..47  00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00    -3.0, 1.0, 1.0
    decoded [0, -3, 1, 0, 1, 0], residual [0, 0, 0, 0.5, 0, 1]
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compressor import Traits
from ..registration import register
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Sampled


@register
@dataclass(frozen=True)
class GradDrop(Sparsifier):
    """The entries above a sampled quantile, at most ``ceil(numel * ratio)`` (see the module's docstring).

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
