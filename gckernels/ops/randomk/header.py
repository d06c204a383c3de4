"""The first numbers of a RandomK payload, which can be read from sums of payloads (see ``randomk/__init__.py``)."""

from __future__ import annotations

import torch

HEADER_NUMEL = 8  # the number of payloads, the parts of the seed, 0
PART_BITS = 11  # bits of the seed in each number
MAX_WORLD = 8192  # maximum number of payloads with an exact sum: 2**13 times a part is below 2**24
_PARTS = range(HEADER_NUMEL - 2)


def header(seed: int) -> torch.Tensor:
    """The header, fp32 ``[8]``, of a payload with this seed."""
    parts = [(seed & 2**64 - 1) >> PART_BITS * part & 2**PART_BITS - 1 for part in _PARTS]
    return torch.tensor([1.0, *parts, 0.0], dtype=torch.float32, device="cpu")


def seed_of(numbers: torch.Tensor) -> int | None:
    """The seed, 0 to ``2**64 - 1``, of a payload or sum of payloads ``fp32 [8, ...]``; ``None`` if it is damaged."""
    count, *parts, zero = numbers[:HEADER_NUMEL].tolist()
    if not (1 <= count <= MAX_WORLD and count == int(count) and zero == 0):
        return None
    seed = 0
    for part, total in enumerate(parts):
        if not (0 <= total < count * 2**PART_BITS and total % count == 0):
            return None
        seed += int(total / count) << PART_BITS * part
    return seed & 2**64 - 1
