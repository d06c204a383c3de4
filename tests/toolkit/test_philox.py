"""Random numbers: Philox4x32-10 agrees with the published vectors and with Triton."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given

from gckernels.toolkit import random
from helpers import KERNEL_PARAM

MASK = 2**32 - 1
SEEDS = st.integers(-(2**63), 2**63 - 1)

# Random123 (Salmon et al., SC'11), examples/kat_vectors: counter, key, result
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 from the paper, in Python integers, for all four counter words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & MASK, first >> 32 ^ c[3] ^ k[1], first & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    assert philox4x32(counter, key) == result


def test_known_answer_with_a_64_bit_counter():
    """The toolkit uses two of the four counter words, so only the first published vector applies."""
    assert random.philox(0, torch.zeros(1, dtype=torch.int64)).tolist() == [list(KNOWN_ANSWERS[0][2])]


@given(seed=SEEDS, counters=st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_torch_is_philox(seed, counters):
    got = random.philox(seed, torch.tensor(counters, dtype=torch.int64))
    key = seed & MASK, seed >> 32 & MASK
    want = [list(philox4x32((counter & MASK, counter >> 32, 0, 0), key)) for counter in counters]
    assert got.tolist() == want


BITS = pytest.mark.parametrize("bits", [8, 16])


@BITS
@given(seed=SEEDS, first=st.integers(0, 2**40), numel=st.integers(0, 30), cut=st.integers(0, 30))
def test_a_number_belongs_to_its_position(bits, seed, first, numel, cut):
    """An element draws the same number wherever the range of elements begins."""
    whole = random.uniform(seed, first, numel, bits)
    assert whole.shape == (numel,)
    cut = min(cut, numel)
    assert torch.equal(random.uniform(seed, first + cut, numel - cut, bits), whole[cut:])


def test_draws_are_the_bits_of_philox():
    """The order is the one in the module's docstring: lowest bits of the lowest word first."""
    blocks = random.philox(9, torch.tensor([0, 1]))
    string = blocks.flatten().to(torch.int64)
    bytes_ = torch.stack([(string >> shift) & 0xFF for shift in (0, 8, 16, 24)], 1).flatten()
    assert torch.equal(random.uniform(9, 0, 32, 8), (bytes_ + 0.5).float() / 256)
    assert torch.equal(random.uniform(9, 0, 16, 16), (bytes_[::2] + 256 * bytes_[1::2] + 0.5).float() / 65536)


@BITS
def test_uniform_is_uniform(bits):
    u = random.uniform(5, 3, 100_000, bits)
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0.5 / 2**bits
    assert float(u.max()) <= 1 - 0.5 / 2**bits
    assert torch.equal(u * 2**bits, (u * 2**bits).floor() + 0.5)
    # the standard error of the mean of 100000 is 0.29 / 316
    assert abs(float(u.double().mean()) - 0.5) < 4 * 0.2887 / 100_000**0.5


@triton.jit
def _uniform_kernel(out_ptr, seed, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + offsets, random.uniform_tile(seed, tl.cast(first, tl.int64), ROWS, COLUMNS, BITS))


@triton.jit
def _philox_kernel(out_ptr, seed, low, high):
    zero = tl.zeros((4,), tl.uint32)
    low = zero + tl.cast(low, tl.int64).to(tl.uint32)
    high = zero + tl.cast(high, tl.int64).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    words = tl.arange(0, 4)
    mixed = tl.where(words == 0, a, tl.where(words == 1, b, tl.where(words == 2, c, d)))
    tl.store(out_ptr + words, mixed.to(tl.int64))


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@given(seed=SEEDS | st.sampled_from([0, 1, 16, -1, 2**31, 2**32 - 1]), counter=st.integers(0, 2**63 - 1))
def test_triton_is_philox(implementation, seed, counter):
    out = torch.empty(4, dtype=torch.int64, device=implementation.device)
    _philox_kernel[(1,)](out, seed, counter & MASK, counter >> 32)
    assert out.tolist() == random.philox(seed, torch.tensor([counter]))[0].tolist()


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@pytest.mark.parametrize("seed", [0, 1, 16, 123456789, -1, -77, 2**31, 2**32 - 1, 2**40 + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("first", [0, 16, 2048, 2**31, 2**35 + 16, 2**37])
@BITS
def test_triton_draws_what_torch_draws(implementation, seed, first, bits):
    rows, columns = 4, 32
    out = torch.empty(rows, columns, device=implementation.device)
    _uniform_kernel[(1,)](out, seed, first, rows, columns, bits)
    assert torch.equal(out.cpu().flatten(), random.uniform(seed, first, rows * columns, bits))
