"""Counter-based random numbers: Philox4x32-7 (Salmon et al., SC'11), the same bits in torch and in Triton.

Seven rounds are the fewest with which the generator passes all tests of BigCrush (section 5 of the paper); libraries
that do not know what their numbers are for take ten.

A block with key ``seed`` (64 bits) and counter ``c`` (32 bits, in the first counter word) has 128 random bits: four
words of 32 bits. An element draws 16 of them, and a block serves 16 elements: element ``i`` uses the lowest 16 bits of
word ``i // 4 % 4`` of block ``i // 16 % 2**32``, rotated to the right by ``8 * (i % 4)`` bits. So each byte is in the
draws of two neighbours, the high one of one and the low one of the other. Every draw by itself is uniform, and what is
rounded by it is unbiased. The draws of neighbours correlate by 1/256, which changes the variance of a sum of rounded
numbers by less than a hundredth, and the expected square of the error, on which convergence proofs rest, not at all. A
draw depends only on the seed and the element's position, not on the device, the grid, or the chunks of a unit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .target import for_nvidia

_MASK = 0xFFFFFFFF
_ROUNDS = 7
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """The random blocks of ``counter``, ``int64 [n]``: four words in ``0 .. 2**32 - 1`` each, as ``int64 [n, 4]``.

    Counters that are equal modulo ``2**32`` have the same block.
    """
    c0 = counter & _MASK
    c1, c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B  # 64-bit products wrap around in int64, but have the right bits
        c0, c1, c2, c3 = (b >> 32) & _MASK ^ c1 ^ k0, b & _MASK, (a >> 32) & _MASK ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def dither(seed: int, first: int, numel: int, base: int = 128, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random numbers in ``[base, base + 1)``, fp32 ``[numel]``, of the elements ``first .. first + numel - 1``.

    If ``d`` is an element's draw, its number is ``base + d / 2**16``. The 16 lowest bits of the number are the draw, so
    nothing is converted. ``base`` is an integer from 128 to 255. See :func:`rounded_at_random`.
    """
    blocks = torch.arange(first // 16, -(-(first + numel) // 16), dtype=torch.int64, device=device)
    words, shifts = philox(seed, blocks)[:, :, None], torch.arange(0, 32, 8, dtype=torch.int64, device=device)
    draws = (words >> shifts | words << (32 - shifts)) & 0xFFFF
    return base + draws.flatten()[first % 16 :][:numel].to(torch.float32) / 2**16


def rounded_at_random(values: torch.Tensor, dither: torch.Tensor, bits: int) -> torch.Tensor:
    """Each of ``values`` rounded to one of the two integers around it, the upper one with the probability of its
    fraction, to half a step of ``2**-16``; int32. Integers stay as they are.

    Quantisers call it in their maps. The sum of a value and its dither is precise to ``2**-16``. It has its integer
    part in the seven highest bits of its mantissa, and the lowest ``bits`` of these are the result. So with a base of
    129 the results are larger by one than with 128, where they are the integers themselves.

    Args:
        values: fp32. Their sum with the dither's base is from 128 to 255. They may exceed an integer by ``2**-18`` and
            still count as that integer.
        dither: see :func:`dither`.
        bits: the number of bits of the results, at most 7.
    """
    return ((values + dither).view(torch.int32) >> 16) & (2**bits - 1)


@triton.jit
def dither_tile(seed, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BASE: tl.constexpr):
    """:func:`dither` as ``[ROWS, COLUMNS]``, for the elements from ``first`` on, an int64 multiple of 16."""
    BLOCKS: tl.constexpr = COLUMNS // 16
    blocks = tl.reshape(tl.arange(0, ROWS * BLOCKS), (ROWS, BLOCKS)).to(tl.uint32)
    blocks = tl.add(blocks, (first // 16).to(tl.uint32), sanitize_overflow=False)
    a, b, c, d = philox_tile(seed, blocks)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    if for_nvidia():  # one instruction takes two bytes of a word, and the two highest of the base
        drawn = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, $5, 0x7610;
            prmt.b32 $1, $4, $5, 0x7621;
            prmt.b32 $2, $4, $5, 0x7632;
            prmt.b32 $3, $4, $5, 0x7603;
            """,
            "=&r,=&r,=&r,=&r,r,r",
            [words, tl.full(words.shape, BASE, tl.float32)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        drawn = (
            _dithered(words, BASE),
            _dithered(words >> 8, BASE),
            _dithered(words >> 16, BASE),
            _dithered(words >> 24 | words << 8, BASE),
        )
    return tl.reshape(tl.join(tl.join(drawn[0], drawn[2]), tl.join(drawn[1], drawn[3])), (ROWS, COLUMNS))


@triton.jit
def _dithered(draws, BASE: tl.constexpr):
    bits = tl.full(draws.shape, BASE, tl.float32).to(tl.uint32, bitcast=True)
    return (bits | (draws & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def philox_tile(seed, counters):
    """:func:`philox`, as four uint32 tensors, for uint32 counters."""
    seed = tl.full((), seed, tl.int64).to(tl.uint64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    # three words of the counter are 0: the first round has one product, and in the second one of two is that of a key
    low_a, high_a = _product(counters, 0xD2511F53)
    low_key, high_key = _product(k0, 0xD2511F53)
    c2, c3 = high_a ^ k1, low_a
    k0, k1 = _next_keys(k0, k1)
    low_b, high_b = _product(c2, 0xCD9E8D57)
    c0, c1, c2 = high_b ^ k0, low_b, high_key ^ c3 ^ k1
    c3 = tl.zeros_like(c2) + low_key
    for _ in tl.static_range(_LATER_ROUNDS):
        k0, k1 = _next_keys(k0, k1)
        low_a, high_a = _product(c0, 0xD2511F53)
        low_b, high_b = _product(c2, 0xCD9E8D57)
        c0, c1 = high_b ^ c1 ^ k0, low_b
        c2, c3 = high_a ^ c3 ^ k1, low_a
    return c0, c1, c2, c3


_LATER_ROUNDS = tl.constexpr(_ROUNDS - 2)


@triton.jit
def _next_keys(k0, k1):
    return tl.add(k0, 0x9E3779B9, sanitize_overflow=False), tl.add(k1, 0xBB67AE85, sanitize_overflow=False)


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
