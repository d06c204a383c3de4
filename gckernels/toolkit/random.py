"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11), the same bits in torch and in Triton.

A block with key ``seed`` (64 bits) and counter ``c`` (64 bits, in the two low counter words) is 128 random bits, four
words of 32. An element draws ``b`` of them, 8 or 16, so a block serves 16 or 8 elements: element ``i`` owns the bits
from ``b * i % 32`` on of word ``b * i // 32 % 4`` of block ``b * i // 128``. A draw depends on the seed and the
element's position alone: not on the device, the grid or the way a unit is cut into chunks.
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


def uniform(seed: int, first: int, numel: int, bits: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uniform fp32 in ``(0, 1)``, ``[numel]``, of the elements ``first .. first + numel - 1``.

    With ``d`` an element's draw of ``bits`` bits, 8 or 16, the number is ``(d + 1/2) / 2**bits``: a comparison with it
    is right to half a step of ``2**-bits`` for every probability, and never true for 0 nor false for 1.
    """
    per_word = 32 // bits
    per_block = 4 * per_word
    blocks = torch.arange(first // per_block, -(-(first + numel) // per_block), dtype=torch.int64, device=device)
    shifts = torch.arange(per_word, device=device) * bits
    draws = (philox(seed, blocks)[:, :, None] >> shifts) & (2**bits - 1)
    return (draws.flatten()[first % per_block :][:numel].to(torch.float32) + 0.5) * 2.0**-bits


@triton.jit
def uniform_tile(seed, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """:func:`uniform` of the elements from ``first`` (int64, a multiple of 16) on, as ``[ROWS, COLUMNS]``."""
    PER_WORD: tl.constexpr = 32 // BITS
    BLOCKS: tl.constexpr = COLUMNS // (4 * PER_WORD)
    blocks = tl.reshape(tl.arange(0, ROWS * BLOCKS), (ROWS, BLOCKS)).to(tl.int64) + first // (4 * PER_WORD)
    zero = tl.zeros((ROWS, BLOCKS), tl.uint32)
    low, high = blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, BLOCKS * 4))
    shifts = tl.arange(0, PER_WORD).to(tl.uint32) * BITS
    draws = tl.reshape((words[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1), (ROWS, COLUMNS))
    return (draws.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2**BITS)
