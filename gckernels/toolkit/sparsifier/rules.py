"""The rules of selections, for the host path and for kernels: a first bound, which few elements reach, and what is then
sent of these candidates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Narrowing(IntEnum):
    """Which candidates are sent, elements that reach a first bound; C has the same names."""

    NONE = 0  # all, as far as there is room
    LEADING = 1  # all that are not below the k-th largest one in their leading bits
    EXACT = 2  # the k largest


@dataclass(frozen=True)
class BoundRule:
    """How the bounds of a chunk are found.

    Attributes:
        narrowing: which candidates are sent.
        key: the first bound, if it is given; otherwise 0.
        by_sample: whether the first bound is the specified key of the specified sample (``sample_positions`` in
            ``keys.py``), which nothing below may pass. Otherwise it is one that at least ``k`` keys will reach, found
            in another sample.
    """

    narrowing: Narrowing = Narrowing.NONE
    key: int = 0
    by_sample: bool = False
