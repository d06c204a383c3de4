"""TopK: the k entries of largest magnitude, exactly, with error feedback.

Aji & Heafield, arXiv:1704.05021, section 3, drop a fixed share of the smallest entries and keep them for later steps.
They estimate the threshold on a sample (``graddrop.py``); here it is exact. If magnitudes are equal, the lower index
goes first. Zeros are not sent, so there may be fewer than k entries.

Wire format: that of ``toolkit/sparsifier``, with ``k = ceil(numel * ratio)``: header, then ``highs``, ``lows``,
``scales`` and ``values`` as in ``toolkit/sparsifier/entries.py``.

Example: ``TopK(ratio=0.25, value_bits=4)``, ``p = [0, -7, 0.5, 0, 3, 0, 0, 0, 1, 2.25, 0, 0]``, hence k = 3. Groups
have two elements (``low`` is 1); entries 0, 1 and 2 are in groups 0, 2 and 4. Scale 1, codes 1 11 10 (-7, 3, 2)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  49 00 00 00 00 .. 00                               bits 0 + 0, 1 + 2 and 2 + 4
    bytes 32..47  05 00 00 00 00 .. 00                               1, 0 and 1: indices 1, 4 and 9
    bytes 48..63  00 00 80 3F 00 .. 00                               1.0
    bytes 64..79  B1 0A 00 00 00 .. 00                               codes, low nibble first
    decoded [0, -7, 0, 0, 3, 0, 0, 0, 0, 2, 0, 0], residual [0, 0, 0.5, 0, 0, 0, 0, 0, 1, 0.25, 0, 0]

Example: ``TopK(ratio=0.5)``, ``p = [0, -3, 1, 0.5, 1, 0]``, hence k = 3, in groups of one element (``low`` is 0)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  4A 00 00 00 00 .. 00                               bits 0 + 1, 1 + 2 and 2 + 4
    bytes 32..47  00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00    -3.0, 1.0, 1.0
    decoded [0, -3, 1, 0, 1, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compressor import Traits
from ..registration import register
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Exact


@register
@dataclass(frozen=True)
class TopK(Sparsifier):
    """The ``ceil(numel * ratio)`` entries of largest magnitude, exactly (see the module's docstring).

    Attributes:
        ratio: share of the entries that is sent, above 0 and at most 1.
        value_bits: 32 (fp32), 16 (bf16), or 8, 4 or 2 bits of codes with a scale for every 64 entries.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)
    selection = Exact()

    ratio: float = 0.01
    value_bits: int = 32
