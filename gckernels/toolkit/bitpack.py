"""Packing of codes of a few bits into bytes: up to 16 bits in torch, 1 to 8 bits in kernels.

The codes form one string of bits, lowest first: bit ``j`` of code ``i``, with ``b`` bits per code, is bit
``k = i * b + j`` of the string, and bit ``k % 8`` of byte ``k // 8``. Examples: with 1 bit, the codes
``1 0 1 1 0 0 0 0 | 1`` become ``0x0D 0x01``; with 4 bits, ``3 10 7`` become ``0xA3 0x07``; with 3 bits, ``1 2 7``
become ``0xD1 0x01``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numeric import small_to_fp32
from .target import for_nvidia


def packed_nbytes(numel: int, bits: int) -> int:
    """Size in bytes of ``numel`` packed codes of ``bits`` bits."""
    return -(-numel * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed codes, ``uint8 [packed_nbytes(numel, bits)]``, of integer ``codes [numel]`` in ``0 .. 2**bits - 1``."""
    return _regroup(codes, bits, 8, packed_nbytes(codes.numel(), bits)).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """The codes, ``int32 [numel]``, of ``packed``, ``uint8 [nbytes]``: the inverse of :func:`pack`."""
    return _regroup(packed, 8, bits, numel)


def _regroup(values: torch.Tensor, bits_in: int, bits_out: int, count: int) -> torch.Tensor:
    """The string of bits in ``values``, with ``bits_in`` each, as ``int32 [count]`` with ``bits_out`` bits each."""
    shifts = torch.arange(16, dtype=torch.int32, device=values.device)
    string = ((values.to(torch.int32)[:, None] >> shifts[:bits_in]) & 1).flatten()
    padded = string.new_zeros(count * bits_out)
    padded[: string.numel()] = string[: count * bits_out]
    return (padded.view(count, bits_out) << shifts[:bits_out]).sum(1, dtype=torch.int32)


@triton.jit
def packed_slots(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, WORD_BITS: tl.constexpr = 8):
    """Numbers of the words of :func:`pack_bits`, from the tile's first word on, and a mask of the used ones."""
    ROW_WORDS: tl.constexpr = COLUMNS * BITS // WORD_BITS
    if 8 % BITS == 0:
        offsets = rows[:, None] * ROW_WORDS + tl.arange(0, ROW_WORDS)[None, :]
        used = offsets >= 0
    else:  # eight codes in BITS bytes, each group computed as eight
        columns = tl.arange(0, COLUMNS)[None, :]
        offsets = rows[:, None] * ROW_WORDS + columns // 8 * BITS + columns % 8
        used = (offsets >= 0) & (columns % 8 < BITS)
    return offsets, used


@triton.jit
def pack_bits(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, WORD_BITS: tl.constexpr = 8):
    """Packed words of 8, 16 or 32 bits, ``int32`` in the shape of :func:`packed_slots`, of ``codes [ROWS, COLUMNS]``.

    Only the lowest eight bits of each code are meant. Words are bytes if codes of ``BITS`` bits do not fill a byte.
    """
    tl.static_assert(WORD_BITS == 8 or (BITS < 8 and 8 % BITS == 0))
    if BITS == 8:
        return codes
    elif 8 % BITS == 0:  # each sum stays within the elements of one thread
        PER_WORD: tl.constexpr = WORD_BITS // BITS
        lanes = tl.reshape(codes, (ROWS, COLUMNS // PER_WORD, PER_WORD)).to(tl.uint32)
        # in the highest bits: what ends in the lowest ones, compilers compute with bytes, which they have to shuffle
        shifts = (tl.arange(0, PER_WORD) * BITS + (32 - WORD_BITS)).to(tl.uint32)
        return (tl.sum(lanes << shifts[None, None, :], axis=2) >> (32 - WORD_BITS)).to(tl.int32, bitcast=True)
    else:
        lanes = tl.reshape(codes, (ROWS, COLUMNS // 8, 8)).to(tl.int64)
        places = tl.arange(0, 8).to(tl.int64)
        words = tl.sum(lanes << (places * BITS)[None, None, :], axis=2)
        return tl.reshape(words[:, :, None] >> (places * 8)[None, None, :], (ROWS, COLUMNS)).to(tl.int32)


@triton.jit
def without_tail(packed, slots, count, BITS: tl.constexpr, WORD_BITS: tl.constexpr = 8):
    """Packed words number ``slots``, with zeros in the place of all codes from number ``count`` on."""
    inside = tl.minimum(tl.maximum(count * BITS - slots * WORD_BITS, 0), WORD_BITS)  # bits of the word
    return packed & ((tl.full((), 1, tl.int64) << inside) - 1).to(tl.int32)


@triton.jit
def _shifted_once(words, counts):
    """Words shifted to the right; LLVM would shift by the sum of this count and any later one."""
    if for_nvidia():
        return tl.inline_asm_elementwise(
            "shr.u32 $0, $1, $2;", "=r,r,r", [words, counts], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return words >> counts


@triton.jit
def _with_bits(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """``words & MASK | BITS``: one instruction, of which ptxas would make two, because both are numbers."""
    if for_nvidia():
        mask, bits = tl.full((), MASK, tl.uint32), tl.full((), BITS, tl.uint32)
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, mask, bits], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return (words & MASK) | BITS


@triton.jit
def _at_places(
    OF: tl.constexpr, words, PLACE: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """``OF(words, place, FORM)`` of ``COUNT`` places from ``PLACE`` on, ``STEP`` bits apart, in a new last dimension or
    several."""
    if COUNT == 1:
        return OF(words, PLACE, FORM)
    else:
        even = _at_places(OF, words, PLACE, 2 * STEP, COUNT // 2, FORM)
        return tl.join(even, _at_places(OF, words, PLACE + STEP, 2 * STEP, COUNT // 2, FORM))


@triton.jit
def _bits_at(words, PLACE: tl.constexpr, FORM: tl.constexpr):
    return words >> PLACE


@triton.jit
def _number_at(words, PLACE: tl.constexpr, FORM: tl.constexpr):
    """The fp32 number of the code at ``PLACE``.

    The code stays where it is: it becomes a part of the mantissa of the power of two whose bit there counts 1, which is
    then subtracted. Both are exact. A mantissa has room for 16 places, so half of a word is shifted once.
    """
    if PLACE >= 16:
        words = words >> 16
    AT: tl.constexpr = PLACE % 16
    bits = _with_bits(words, FORM.mask << AT, (150 - AT) << 23)
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - AT) + FORM.zero)


@triton.jit
def _sign_at(words, PLACE: tl.constexpr, FORM: tl.constexpr):
    """The bit at ``PLACE`` as a sign."""
    return ((words << (31 - PLACE)) & 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def _load_runs(
    field_ptr, nbytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """The words of :func:`load_codes`, ``uint32 [ROWS, COLUMNS // RUN]``, or with a last dimension if a run fills
    several; the codes of a run from their lowest bit on."""
    WORD_BITS: tl.constexpr = min(max(RUN * BITS, 8), 32)
    WORD: tl.constexpr = tl.uint8 if WORD_BITS == 8 else tl.uint16 if WORD_BITS == 16 else tl.uint32
    WORDS: tl.constexpr = max(RUN * BITS // 32, 1)  # in a run
    COUNT: tl.constexpr = COLUMNS // RUN
    # compilers merge loads of neighbours, unless they do not know that these are neighbours
    runs = tl.abs(tl.reshape(tl.arange(0, ROWS * COUNT), (ROWS, COUNT)))
    if WORDS > 1:
        words = runs[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    elif RUN * BITS < 8:  # two runs in a word
        words = runs // 2
    else:
        words = runs
    words_ptr = field_ptr.to(tl.pointer_type(WORD)) + words
    if IS_FULL:
        loaded = tl.load(words_ptr).to(tl.uint32)
    else:
        loaded = tl.load(words_ptr, mask=words * (WORD_BITS // 8) < nbytes, other=0).to(tl.uint32)
    if RUN * BITS < 8:
        loaded = _shifted_once(loaded, (runs % 2 * RUN).to(tl.uint32))
    return loaded


@triton.jit
def load_numbers(
    field_ptr, nbytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
    IS_FULL: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The codes of :func:`load_codes` as :func:`as_numbers` has them."""
    if 8 % BITS == 0:
        words = _load_runs(field_ptr, nbytes, ROWS, COLUMNS, BITS, RUN, IS_FULL)
        COUNT: tl.constexpr = min(32 // BITS, RUN)
        numbers = tl.reshape(_at_places(_number_at, words, 0, BITS, COUNT, FORM), (ROWS, COLUMNS))
        if FORM.signed:
            signs = _at_places(_sign_at, words, BITS - 1, BITS, COUNT, FORM)
            return numbers, tl.reshape(signs, (ROWS, COLUMNS))
        else:
            return (numbers,)
    else:
        return as_numbers(load_codes(field_ptr, nbytes, ROWS, COLUMNS, BITS, RUN, IS_FULL), BITS, FORM)


@triton.jit
def as_numbers(codes, BITS: tl.constexpr, FORM: tl.constexpr):
    """Codes as ``(numbers,)``, the bits of ``FORM.mask`` less ``FORM.zero`` in fp32; or as ``(numbers, signs)``, where
    signs are int32 with the highest bit of the code as highest bit, if ``FORM.signed``."""
    kept = codes
    if FORM.mask < 2**BITS - 1:
        kept = codes & FORM.mask
    if FORM.signed:
        return small_to_fp32(kept, FORM.zero), (codes << (32 - BITS)) & -0x80000000
    else:
        return (small_to_fp32(kept, FORM.zero),)


@triton.jit
def load_codes(
    field_ptr, nbytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """Codes ``int32 [ROWS, COLUMNS]`` of a field of ``nbytes``, a multiple of 4; any numbers behind the field.

    Nothing behind the field is read unless the caller says that it ``IS_FULL`` of codes.

    A thread loads the codes of ``RUN`` neighbours, 4 or 8, at a time. If it loaded the 16 bytes that compilers prefer,
    threads would have to exchange codes before each could store 16 bytes of decoded values.
    """
    if 8 % BITS == 0:
        words = _load_runs(field_ptr, nbytes, ROWS, COLUMNS, BITS, RUN, IS_FULL)
        codes = tl.reshape(_at_places(_bits_at, words, 0, BITS, min(32 // BITS, RUN), None), (ROWS, COLUMNS))
        return codes.to(tl.int32, bitcast=True) & (2**BITS - 1)
    else:
        slots, used = packed_slots(tl.arange(0, ROWS), ROWS, COLUMNS, BITS)
        packed = tl.load(field_ptr + slots, mask=used & (slots < nbytes), other=0)
        lanes = tl.reshape(packed, (ROWS, COLUMNS // 8, 8)).to(tl.int64)
        places = tl.arange(0, 8).to(tl.int64)
        words = tl.sum(lanes << (places * 8)[None, None, :], axis=2)
        codes = (words[:, :, None] >> (places * BITS)[None, None, :]) & (2**BITS - 1)
        return tl.reshape(codes, (ROWS, COLUMNS)).to(tl.int32)


@triton.jit
def num_ones(words):
    """The number of ones among the bits of each int32."""
    ones = words - ((words >> 1) & 0x55555555)
    ones = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
    ones = (ones + (ones >> 4)) & 0x0F0F0F0F
    ones += ones >> 8
    return (ones + (ones >> 16)) & 63


@triton.jit
def ones_of(mask, WORDS: tl.constexpr):
    """``(words, number of ones)`` of a mask ``[WORDS, 32]``: int32 with a bit for every element, lowest bits first.

    A thread adds up the bits of its own elements, and their number, before threads exchange anything.
    """
    bits, parts = tl.arange(0, 4), tl.arange(0, 8)
    own = tl.sum(tl.where(tl.reshape(mask, (WORDS, 8, 4)), (256 + (1 << bits))[None, None, :], 0), 2)
    words = tl.sum((own & 255).to(tl.uint32) << (4 * parts).to(tl.uint32)[None, :], 1).to(tl.int32, bitcast=True)
    return words, tl.sum(own >> 8)


@triton.jit
def lowest_ones(words, count):
    """The lowest ``count`` ones among the bits of each int32: none if ``count`` is negative, all if there are fewer."""
    width = words * 0  # as many of the lowest bits as have at most `count` ones
    for step in tl.static_range(5):
        wider = width + (16 >> step)
        width = tl.where(num_ones(words & ((1 << wider) - 1)) <= count, wider, width)
    return tl.where(num_ones(words) <= count, words, words & ((1 << width) - 1))


@triton.jit
def lowest_one(words):
    """The place of the lowest one among the bits of each int32, which is not 0."""
    return (((words & -words).to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
