"""TopK: the k entries of largest magnitude, exactly, with error feedback.

Source: Aji & Heafield, arXiv:1704.05021, section 3, who drop a fixed share of the smallest entries and keep them for
later steps; there with a threshold from a sample (``graddrop.py``), here with the exact one. Of equal magnitudes the
lower index goes first. Zeros are not sent: with fewer than k other entries, ``count`` is below k.

Wire format: that of ``toolkit/sparse.py``, with ``k = ceil(numel * ratio)``: header, ``count`` (int32, padded to 16
bytes), ``indices`` (int32 ``[k]``), ``values`` (fp32 or bf16 ``[k]``).

Example: ``ratio=0.5``, ``p = [0, -3, 1, 0.5, 1, 0]``, hence k = 3; of the two ones there is room for both::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  03 00 00 00 00 .. 00                               3 entries
    bytes 32..47  01 00 00 00 02 00 00 00 04 00 00 00 00 00 00 00    1, 2, 4
    bytes 48..63  00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00    -3.0, 1.0, 1.0
    decoded [0, -3, 1, 0, 1, 0], residual [0, 0, 0, 0.5, 0, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compressor import register
from ..toolkit.sparse import Sparsifier
from ..toolkit.sparse_keys import kth_largest


@register
@dataclass(frozen=True)
class TopK(Sparsifier):
    """The ``ceil(numel * ratio)`` entries of largest magnitude, exactly (see the module's docstring).

    Attributes:
        ratio: share of the entries that is sent, above 0 and at most 1.
        value_dtype: ``torch.float32`` or ``torch.bfloat16``.

    Raises:
        ValueError: for any other value.
    """

    digits = 3

    ratio: float = 0.01
    value_dtype: torch.dtype = torch.float32

    def bounds_reference(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        key = kth_largest(keys, k)
        return key, key
