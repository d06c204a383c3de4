"""MSTopK: approximately the k entries of largest magnitude, found by counting, with error feedback.

Shi et al., arXiv:2101.10761, MSTopK: a fixed number of bisections, each of which counts the entries above a threshold,
ends with two thresholds. At most k entries are above the upper one, and at least k are above the lower one. All entries
above the upper threshold are sent, and as many of those between as fit. Nothing is sorted.

Here eleven bisections go over the leading bits of the magnitude (exponent and three bits of the mantissa) instead of
the range from mean to maximum. The thresholds are then at most an eighth apart for any distribution. Among the entries
between the thresholds those with the lowest indices are sent, instead of a run from a random start; error feedback
makes the others larger in the next step. So exactly k entries are sent, or all that are not zero. An entry that is not
sent exceeds the sent ones by at most an eighth (except for subnormal numbers).

Wire format: that of ``toolkit/sparsifier``, with ``k = ceil(numel * ratio)``: header, then ``highs``, ``lows``,
``scales`` and ``values`` as in ``toolkit/sparsifier/entries.py``.

Example: ``MSTopK(ratio=0.5)``, ``p = [1.0625, 0, -3, 1.09375, 0.5, 1.0]``, hence k = 3. The third largest lies in the
class from 1 to 1.125. Entry 2 is larger and is sent, with the two lowest indices of the class, 0 and 3. Groups have one
element (``low`` is 0)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  29 00 00 00 00 .. 00                               bits 0 + 0, 1 + 2 and 2 + 3
    bytes 32..47  00 00 88 3F 00 00 40 C0 00 00 8C 3F 00 00 00 00    1.0625, -3.0, 1.09375
    decoded [1.0625, 0, -3, 1.09375, 0, 0], residual [0, 0, 0, 0, 0.5, 1]
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compressor import Traits
from ..registration import register
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Leading


@register
@dataclass(frozen=True)
class MSTopK(Sparsifier):
    """The ``ceil(numel * ratio)`` largest entries, up to an eighth of their magnitude (see the module's docstring).

    Attributes:
        ratio: share of the entries that is sent, above 0 and at most 1.
        value_bits: 32 (fp32), 16 (bf16), or 8, 4 or 2 bits of codes with a scale for every 64 entries.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)
    selection = Leading()

    ratio: float = 0.01
    value_bits: int = 32
