"""Threshold: the entries that exceed a given magnitude, with error feedback.

Strom, Interspeech 2015 (the threshold, there with values of one magnitude: ``tbq.py``); as a compressor that
sends the values themselves in GRACE (Xu et al., ICDCS 2021).

Entries with ``abs(p) > tau`` are sent; if they are more than ``k = ceil(numel * ratio)``, only the first k by index.
Inf and NaN take precedence. GRACE's payload grows and shrinks. This one has a fixed size, and entries that do not fit
stay in the residual. ``tau`` is rounded to fp32.

Choose ``tau`` so that fewer entries exceed it than fit. If more exceed it in every step, those with high indices wait
long, and training suffers. Therefore ``ratio`` is ten times as large by default as that of the other sparsifiers.

Wire format: that of ``toolkit/sparsifier``: header, then ``highs``, ``lows``, ``scales`` and ``values`` as in
``toolkit/sparsifier/entries.py``.

Example: ``Threshold(tau=0.5, ratio=0.5)``, ``p = [0, -3, 1, 0.5, 0.25, 0]``, hence k = 3; only entries 1 and 2 are
sent. Groups have one element (``low`` is 0)::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  0A 00 00 00 00 .. 00                               bits 0 + 1 and 1 + 2
    bytes 32..47  00 00 40 C0 00 00 80 3F 00 00 00 00 00 00 00 00    -3.0, 1.0
    decoded [0, -3, 1, 0, 0, 0], residual [0, 0, 0, 0.5, 0.25, 0]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..compressor import Traits
from ..registration import register
from ..toolkit.fields import require_float
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Fixed


@register
@dataclass(frozen=True)
class Threshold(Sparsifier):
    """The entries that exceed ``tau``, at most ``ceil(numel * ratio)`` (see the module's docstring).

    Attributes:
        tau: largest magnitude that is not sent, not negative and at most 3.4e38.
        ratio: maximum share of the entries that is sent, above 0 and at most 1.
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
