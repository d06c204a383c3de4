"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11), the same bits in torch and in Triton.

Element ``i`` of a unit owns the 32-bit word ``i % 4`` of the block with key ``seed`` (64 bits) and counter ``i // 4``
(64 bits, in the two low counter words). So a draw depends on the seed and the element's position alone: not on the
device, the grid or the way a unit is cut into chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """Random blocks: counters ``int64 [n]`` to 32-bit words ``int64 [n, 4]``, each in ``0 .. 2**32 - 1``."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B  # the 64-bit products wrap in int64; their bits are right
        c0, c1, c2, c3 = (b >> 32) & _MASK ^ c1 ^ k0, b & _MASK, (a >> 32) & _MASK ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def random_words(seed: int, first: int, numel: int) -> torch.Tensor:
    """The words of elements ``first .. first + numel - 1`` of a unit, ``int64 [numel]``."""
    blocks = torch.arange(first // 4, (first + numel + 3) // 4, dtype=torch.int64)
    return philox(seed, blocks).flatten()[first % 4 :][:numel]


def uniform(seed: int, first: int, numel: int) -> torch.Tensor:
    """Uniform fp32 in ``[0, 1)``, multiples of 2**-24, of elements ``first .. first + numel - 1``."""
    return (random_words(seed, first, numel) >> 8).to(torch.float32) * 2.0**-24


@triton.jit
def uniform_tile(seed, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """:func:`uniform` of the elements from ``first`` (int64, a multiple of 4) on, as ``[ROWS, COLUMNS]``."""
    blocks = tl.reshape(tl.arange(0, ROWS * COLUMNS // 4), (ROWS, COLUMNS // 4)).to(tl.int64) + first // 4
    zero = tl.zeros((ROWS, COLUMNS // 4), tl.uint32)
    low, high = blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLUMNS))
    return (words >> 8).to(tl.float32) * 5.9604644775390625e-08
