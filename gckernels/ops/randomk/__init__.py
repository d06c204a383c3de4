"""RandomK: k entries at random positions, the same on all ranks, with error feedback.

Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (arXiv:1809.07599), definition 2.1 (``rand_k``), where
any k positions are drawn. Here the elements, arranged as a ring, are cut into ``k`` groups of nearly equal sizes, and
one position is drawn in each. This gives k distinct positions, and each can be computed without the others. If sizes
differ, the start of the groups is drawn too. So every element is sent with the same probability, ``k / numel``, to the
resolution of the random numbers.

Ranks that encode with the same seed choose the same positions. So payloads need no indices and can be added: an
allreduce of them is the payload of the mean. A decoder reads the seed from the payload. With error feedback the values
are sent unchanged, not times ``numel / k``.

Large entries wait as long as small ones, ``numel / k`` steps on average, and then arrive as one long step. So RandomK
needs a smaller learning rate and a larger ratio than selection by magnitude; the default is 1/4.

Group i of the k groups of ``numel`` elements starts at ``b(i) = (i * numel + shift) // k``. Its position is
``b(i) + (w * (b(i + 1) - b(i)) >> 32)`` modulo ``numel``, where ``w`` is the first word of Philox block i
(``toolkit/random.py``). The shift is 0 if k divides ``numel``, otherwise ``w * numel >> 32`` with the first word ``w``
of block k. So positions ascend, except that the last group may wrap around, and its position may be the first. Short
last chunks of a unit are padded with zeros, which are sent like other elements.

Wire format: fp32 numbers, little endian, zero padded to a multiple of 16 bytes, without a status word:

- 1, which becomes the number of payloads in a sum;
- the seed, 11 bits in each of six numbers, lowest first; a sum must be divided by the first number;
- 0;
- ``values``, ``k = ceil(numel * ratio)`` of them, times ``scale``.

Size in bytes: ``32 + field(4 * k)``.

If any element is not finite, even one that is not sent, all values are NaN, so that every rank sees it.

The numbers before the values are integers; for up to 8192 ranks their sums are below ``2**24`` and exact. A payload
with other numbers is damaged and decodes to NaN.

Example: ``RandomK(ratio=0.5)``, seed 0, ``p = [1, -2, 0.5, 3]``: two groups of two, in which the random words
0x5F6FB709 and 0x983A586E choose the first position and the second one (with seed 2050 the numbers would begin 1, 2,
1)::

    bytes  0..15  00 00 80 3F 00 .. 00                               1; 0, 0, 0
    bytes 16..31  00 .. 00                                           0, 0, 0; 0
    bytes 32..47  00 00 80 3F 00 00 40 40 00 .. 00                   1.0, 3.0
    decoded [1, 0, 0, 3], residual [0, -2, 0.5, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codec import Backend, Codec, on_first_use
from ...compressor import Traits
from ...registration import register
from ...toolkit.fields import require_ratio
from ...toolkit.payload import ALIGN_NBYTES, round_up, store_floats
from ...toolkit.random import philox
from ...toolkit.sparsifier.keys import capacity, ratio_parts
from .header import HEADER_NUMEL, header, seed_of


def _host() -> Backend:
    from .host import RandomKHost

    return RandomKHost()


def _triton() -> Backend:
    from .launchers import RandomKTriton

    return RandomKTriton()


@register
@dataclass(frozen=True)
class RandomK(Codec):
    """``ceil(numel * ratio)`` entries at positions that follow from the seed (see the module's docstring).

    Attributes:
        ratio: share of the entries that is sent, above 0 and at most 1.

    Raises:
        ValueError: for any other value.
    """

    traits = Traits(summable=True, payload_dtype=torch.float32, needs_feedback=True, stochastic=True)

    ratio: float = 0.25

    def __post_init__(self) -> None:
        require_ratio("RandomK", self.ratio)

    def capacity(self, numel: int) -> int:
        """``k``: entries in the payload of ``numel`` elements, at least one if there are any."""
        return capacity(numel, ratio_parts(self.ratio))

    def payload_nbytes(self, numel: int) -> int:
        return 4 * HEADER_NUMEL + round_up(4 * self.capacity(numel), ALIGN_NBYTES)

    # ---------------------------------------------------------------- reference

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        k = self.capacity(numel)
        padded = values.new_zeros(numel)
        padded[: values.numel()] = values
        if not values.isfinite().all():
            padded.fill_(torch.nan)
        numbers = values.new_zeros(self.payload_nbytes(numel) // 4)
        numbers[:HEADER_NUMEL] = header(seed)
        store_floats(numbers[HEADER_NUMEL : HEADER_NUMEL + k], padded[positions(numel, k, seed)])
        return numbers.view(torch.uint8)

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        numbers, k = payload.view(torch.float32), self.capacity(numel)
        seed = seed_of(numbers)
        if seed is None:
            return numbers.new_full((numel,), torch.nan)
        dense = numbers.new_zeros(numel)
        dense[positions(numel, k, seed)] = numbers[HEADER_NUMEL : HEADER_NUMEL + k]
        return dense

    # ---------------------------------------------------------------- host path and kernels

    host = on_first_use(_host)
    triton = on_first_use(_triton)


def begins(numel: int, k: int, shift: int) -> torch.Tensor:
    """The starts of the ``k`` groups of ``numel`` elements, and the end of the last group, int64 ``[k + 1]``.

    They ascend, and those from ``numel`` on mean the same elements as those from 0 on.
    """
    return (torch.arange(k + 1, dtype=torch.int64, device="cpu") * numel + shift) // k


def positions(numel: int, k: int, seed: int) -> torch.Tensor:
    """The positions of ``k`` entries of ``numel`` elements, int64 ``[k]``; ascending, but the last may be lowest."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    words = philox(seed, torch.arange(k + 1, dtype=torch.int64, device="cpu"))[:, 0]
    bounds = begins(numel, k, int(words[k] * numel >> 32) if numel % k else 0)
    return (bounds[:k] + (words[:k] * bounds.diff() >> 32)) % numel
