"""Bit packing gives the same bytes in torch and in Triton."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis.extra import numpy as arrays

from gckernels.toolkit import bitpack
from gckernels.toolkit.constants import Constants
from helpers import KERNEL, KERNEL_PARAM

BITS = pytest.mark.parametrize("bits", range(1, 9))


@st.composite
def codes_and_bits(draw) -> tuple[np.ndarray, int]:
    bits = draw(st.integers(0, 16))
    numel = draw(st.integers(0, 70))
    return draw(arrays.arrays(np.uint16, numel, elements=st.integers(0, 2**bits - 1))), bits


def packed_by_definition(codes: np.ndarray, bits: int) -> bytes:
    """The codes packed as the module defines it: one string of bits, lowest first."""
    string = sum(code << (i * bits) for i, code in enumerate(codes.tolist()))
    return string.to_bytes(-(-codes.size * bits // 8), "little")


def test_docstring_examples():
    assert bitpack.pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1]), 1).tolist() == [0x0D, 0x01]
    assert bitpack.pack(torch.tensor([3, 10, 7]), 4).tolist() == [0xA3, 0x07]
    assert bitpack.pack(torch.tensor([1, 2, 7]), 3).tolist() == [0xD1, 0x01]


@given(codes_and_bits())
def test_torch_packs_as_defined(given_codes):
    codes, bits = given_codes
    want = packed_by_definition(codes, bits)
    assert bitpack.packed_nbytes(codes.size, bits) == len(want)
    assert bitpack.pack(torch.from_numpy(codes), bits).numpy().tobytes() == want


@given(codes_and_bits())
def test_torch_unpacks_as_defined(given_codes):
    codes, bits = given_codes
    packed = np.frombuffer(packed_by_definition(codes, bits), np.uint8)
    assert np.array_equal(bitpack.unpack(torch.tensor(packed), bits, codes.size).numpy(), codes)


@BITS
@given(data=st.data())
def test_unpacking_ignores_what_stands_behind_the_last_code(bits, data):
    """The unused bits of the last byte may have any value."""
    numel = data.draw(st.integers(0, 40))
    packed = data.draw(arrays.arrays(np.uint8, bitpack.packed_nbytes(numel, bits)))
    want = bitpack.unpack(torch.from_numpy(packed), bits, numel)
    assert not numel or int(want.max()) < 2**bits


@triton.jit
def _words_kernel(codes_ptr, packed_ptr, count, BITS: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr):
    rows = tl.arange(0, 4)
    codes = tl.load(codes_ptr + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    slots, used = bitpack.packed_slots(rows, 4, COLUMNS, BITS, WORD.primitive_bitwidth)
    packed = bitpack.pack_bits(codes, 4, COLUMNS, BITS, WORD.primitive_bitwidth)
    packed = bitpack.without_tail(packed, slots, count, BITS, WORD.primitive_bitwidth)
    tl.store(packed_ptr.to(tl.pointer_type(WORD)) + slots, packed.to(WORD), mask=used)


@pytest.mark.parametrize("word", [tl.int8, tl.int16, tl.int32], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
def test_words_have_the_bytes_of_the_codes(bits, word, implementation):
    """Whatever the words' width; codes from a number on are left out."""
    codes = torch.randint(0, 256, (4, 32), dtype=torch.int32) % 2**bits
    for count in (0, 1, 7, 31, 32, 33, 127, 128):
        packed = torch.empty(128 * bits // 8, dtype=torch.uint8, device=implementation.device)
        _words_kernel[(1,)](codes.to(implementation.device), packed, count, bits, 32, word)
        kept = torch.where(torch.arange(128) < count, codes.flatten(), 0)
        assert torch.equal(packed.cpu(), bitpack.pack(kept, bits))


@triton.jit
def _round_trip_kernel(
    codes_ptr, packed_ptr, back_ptr, nbytes, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RUN: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slots, used = bitpack.packed_slots(rows, ROWS, COLUMNS, BITS)
    tl.store(packed_ptr + slots, bitpack.pack_bits(tl.load(codes_ptr + offsets), ROWS, COLUMNS, BITS), mask=used)
    tl.debug_barrier()  # threads load what others have stored
    codes = bitpack.load_codes(packed_ptr, nbytes, ROWS, COLUMNS, BITS, RUN, IS_FULL)
    tl.store(back_ptr + offsets, codes)


@BITS
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (1, 256), (16, 128), (64, 32)])
@pytest.mark.parametrize("run", [4, 8])
@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
def test_triton_packs_as_torch_does(bits, rows, columns, run, implementation):
    """Codes behind a field that is not full may be any numbers, but those inside are right."""
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.int32)
    packed = torch.empty(rows * columns * bits // 8, dtype=torch.uint8, device=implementation.device)
    back = torch.empty(rows, columns, dtype=torch.int32, device=implementation.device)
    for nbytes in (packed.numel(), packed.numel() // 8 * 4):
        constants = bits, rows, columns, run, nbytes == packed.numel()
        _round_trip_kernel[(1,)](codes.to(implementation.device), packed, back, nbytes, *constants)
        assert torch.equal(packed.cpu(), bitpack.pack(codes.flatten(), bits))
        inside = nbytes * 8 // bits
        assert torch.equal(back.cpu().flatten()[:inside], codes.flatten()[:inside])


@triton.jit
def _numbers_kernel(
    packed_ptr, codes_ptr, numbers_ptr, signs_ptr, nbytes, BITS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store the numbers of packed codes and, behind them, those of the codes themselves."""
    offsets = tl.arange(0, 4)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    loaded = bitpack.load_numbers(packed_ptr, nbytes, 4, COLUMNS, BITS, RUN, True, FORM)
    made = bitpack.as_numbers(tl.load(codes_ptr + offsets), BITS, FORM)
    tl.store(numbers_ptr + offsets, loaded[0])
    tl.store(numbers_ptr + 4 * COLUMNS + offsets, made[0])
    if FORM.signed:
        tl.store(signs_ptr + offsets, loaded[1])
        tl.store(signs_ptr + 4 * COLUMNS + offsets, made[1])


@BITS
@pytest.mark.parametrize("run", [4, 8])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
def test_codes_become_numbers_where_they_lie(bits, run, signed, implementation):
    form = Constants(mask=2 ** (bits - signed) - 1, zero=2 ** (bits - 1) - 1, signed=signed)
    codes = torch.arange(4 * 64, dtype=torch.int32).view(4, 64)[:, torch.randperm(64)] % 2**bits
    packed = bitpack.pack(codes.flatten(), bits).to(implementation.device)
    numbers = torch.empty(2, 4, 64, device=implementation.device)
    signs = torch.empty(2, 4, 64, dtype=torch.int32, device=implementation.device)
    given = packed, codes.to(implementation.device), numbers, signs, packed.numel()
    _numbers_kernel[(1,)](*given, bits, 64, run, form)
    want = ((codes & form.mask) - form.zero).float()
    assert torch.equal(numbers.cpu().view(torch.int32), want.view(torch.int32).expand(2, 4, 64))
    if signed:
        assert torch.equal(signs.cpu(), ((codes >> (bits - 1)) << 31).expand(2, 4, 64))


def test_the_kernel_runs_where_it_should():
    """The kernel is interpreted without a GPU, and compiled with one."""
    compiled = isinstance(_round_trip_kernel, triton.runtime.JITFunction)
    assert compiled == (KERNEL.device == "cuda")
