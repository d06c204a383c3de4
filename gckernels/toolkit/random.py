"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11), the same bits in torch and in Triton.

A block with key ``seed`` (64 bits) and counter ``c`` (64 bits, in the two low counter words) has 128 random bits: four
words of 32 bits. An element draws ``b`` of them, 8 or 16, so a block serves 16 or 8 elements: element ``i`` uses the
``b`` bits from bit ``b * i % 32`` of word ``b * i // 32 % 4`` of block ``b * i // 128``. A draw depends only on the
seed and the element's position, not on the device, the grid, or the chunks of a unit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .target import for_nvidia

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """The random blocks of ``counter``, ``int64 [n]``: four words in ``0 .. 2**32 - 1`` each, as ``int64 [n, 4]``."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B  # 64-bit products wrap around in int64, but have the right bits
        c0, c1, c2, c3 = (b >> 32) & _MASK ^ c1 ^ k0, b & _MASK, (a >> 32) & _MASK ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def uniform(seed: int, first: int, numel: int, bits: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uniform random numbers in ``(0, 1)``, fp32 ``[numel]``, of the elements ``first .. first + numel - 1``.

    If ``d`` is an element's draw of ``bits`` bits, 8 or 16, its number is ``(d + 1/2) / 2**bits``. Comparing it with a
    probability gives that probability to half a step of ``2**-bits``, and exactly for 0 and 1.
    """
    per_word = 32 // bits
    per_block = 4 * per_word
    blocks = torch.arange(first // per_block, -(-(first + numel) // per_block), dtype=torch.int64, device=device)
    shifts = torch.arange(per_word, device=device) * bits
    draws = (philox(seed, blocks)[:, :, None] >> shifts) & (2**bits - 1)
    return (draws.flatten()[first % per_block :][:numel].to(torch.float32) + 0.5) * 2.0**-bits


@triton.jit
def uniform_tile(seed, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """:func:`uniform` as ``[ROWS, COLUMNS]``, for the elements from ``first`` on, an int64 multiple of 16."""
    PER_WORD: tl.constexpr = 32 // BITS
    BLOCKS: tl.constexpr = COLUMNS // (4 * PER_WORD)
    blocks = tl.reshape(tl.arange(0, ROWS * BLOCKS), (ROWS, BLOCKS)).to(tl.int64) + first // (4 * PER_WORD)
    a, b, c, d = philox_tile(seed, blocks)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, BLOCKS * 4))
    shifts = tl.arange(0, PER_WORD).to(tl.uint32) * BITS
    draws = tl.reshape((words[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1), (ROWS, COLUMNS))
    return tl.fma(draws.to(tl.int32).to(tl.float32), 1.0 / 2**BITS, 0.5 / 2**BITS)  # exact


@triton.jit
def philox_tile(seed, blocks):
    """:func:`philox`, as four uint32 tensors, for int64 numbers of blocks."""
    seed = tl.full((), seed, tl.int64).to(tl.uint64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(10):
        low_a, high_a = _product(c0, 0xD2511F53)
        low_b, high_b = _product(c2, 0xCD9E8D57)
        c0, c1 = high_b ^ c1 ^ k0, low_b
        c2, c3 = high_a ^ c3 ^ k1, low_a
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _product(x, FACTOR: tl.constexpr):
    """The low and the high half of ``x * FACTOR``, uint32."""
    if for_nvidia():
        # tl.philox computes the halves by themselves, and LLVM takes some of the products of 64 bits apart again
        return tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$0, $1}, product; }",
            "=r,=r,r,r",
            [x, tl.full(x.shape, FACTOR, tl.uint32)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        product = tl.mul(x.to(tl.uint64), FACTOR, sanitize_overflow=False)
        return product.to(tl.uint32), (product >> 32).to(tl.uint32)
