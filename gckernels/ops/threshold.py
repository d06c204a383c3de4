"""Threshold: what exceeds a given magnitude, with error feedback.

Strom, Interspeech 2015 (the threshold, there with values of one magnitude: ``tbq.py``); as a compressor that
sends the values themselves in GRACE (Xu et al., ICDCS 2021).

Entries with ``abs(p) > tau`` are sent, the first ``k = ceil(numel * ratio)`` by index where there are more, but inf
and NaN before all others. GRACE's payload grows and shrinks; this one has its size, and what does not fit stays in the
residual. ``tau`` is rounded to fp32.

Choose ``tau`` so that fewer entries pass than there is room for. Where more do, in every step, those with high indices
wait long, and training suffers; hence ten times as much room by default as the other sparsifiers have.

Wire format: that of ``toolkit/sparsifier``: header, then ``highs``, ``lows``, ``scales`` and ``values`` as in
``toolkit/sparsifier/entries.py``.

Example: ``Threshold(tau=0.5, ratio=0.5)``, ``p = [0, -3, 1, 0.5, 0.25, 0]``, hence k = 3, of which two are used, 1 and
2. Each is a group of its own (``low`` is 0)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  0A 00 00 00 00 .. 00                               bits 0 + 1 and 1 + 2
    bytes 32..47  00 00 40 C0 00 00 80 3F 00 00 00 00 00 00 00 00    -3.0, 1.0
    decoded [0, -3, 1, 0, 0, 0], residual [0, 0, 0, 0.5, 0.25, 0]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..method import Traits
from ..registration import register
from ..toolkit.fields import require_float
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Fixed


@register
@dataclass(frozen=True)
class Threshold(Sparsifier):
    """What exceeds ``tau``, at most ``ceil(numel * ratio)`` entries (see the module's docstring).

    Attributes:
        tau: magnitude that is not sent any more, not negative and at most 3.4e38.
        ratio: share of the entries that there is room for, above 0 and at most 1.
        value_bits: 32 (fp32), 16 (bf16), or 8, 4 or 2 bits of codes with a scale for every 64 entries.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(needs_feedback=True)

    tau: float = 0.01
    ratio: float = 0.1
    value_bits: int = 32

    def __post_init__(self) -> None:
        require_float(self.name, "tau", self.tau, 0.0, 3.4028234e38)
        super().__post_init__()

    @property
    def selection(self) -> Fixed:
        key_of_tau: int = struct.unpack("<i", struct.pack("<f", abs(self.tau)))[0]
        return Fixed(key_of_tau + 1)
