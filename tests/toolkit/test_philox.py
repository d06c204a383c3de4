"""Random numbers: Philox4x32-7 agrees with the published vectors, in torch and in Triton, and rounds without a bias."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given

from cases import cases
from gckernels.toolkit import random
from helpers import KERNEL_PARAM

MASK = 2**32 - 1
SEEDS = st.integers(-(2**63), 2**63 - 1)

# Random123 (Salmon et al., SC'11), examples/kat_vectors, seven rounds: counter, key, result
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-7 from the paper, in Python integers, for all four counter words."""
    c, k = list(counter), list(key)
    for _ in range(7):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & MASK, first >> 32 ^ c[3] ^ k[1], first & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    assert philox4x32(counter, key) == result


def test_known_answer_with_a_counter_of_one_word():
    """The toolkit uses one of the four counter words, so only the first published vector applies."""
    assert random.philox(0, torch.zeros(1, dtype=torch.int64)).tolist() == [list(KNOWN_ANSWERS[0][2])]


@given(seed=SEEDS, counters=st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_torch_is_philox(seed, counters):
    got = random.philox(seed, torch.tensor(counters, dtype=torch.int64))
    key = seed & MASK, seed >> 32 & MASK
    assert got.tolist() == [list(philox4x32((counter & MASK, 0, 0, 0), key)) for counter in counters]


@given(seed=SEEDS, first=st.integers(0, 2**40), numel=st.integers(0, 30), cut=st.integers(0, 30))
def test_a_number_belongs_to_its_position(seed, first, numel, cut):
    """An element draws the same number wherever the range of elements begins."""
    whole = random.dither(seed, first, numel)
    assert whole.shape == (numel,)
    cut = min(cut, numel)
    assert torch.equal(random.dither(seed, first + cut, numel - cut), whole[cut:])


def test_draws_are_the_bits_of_philox():
    """The order is the one in the module's docstring: words are rotated by a byte from element to element."""
    words = random.philox(9, torch.tensor([0, 1])).flatten().tolist()
    rotated = [(word << 32 | word) >> 8 * number & 0xFFFF for word in words for number in range(4)]
    assert torch.equal(random.dither(9, 0, 32, 129), 129 + torch.tensor(rotated) / 65536)


def test_dither_is_uniform():
    drawn = random.dither(5, 3, 200_000)
    assert drawn.dtype == torch.float32
    draws = (drawn.double() - 128) * 65536
    assert torch.equal(draws, draws.floor())
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 65536
    # there are 256 equally likely values, so each is drawn 781 times, with a standard error of 28
    for byte in (draws // 256, draws % 256):
        assert (torch.bincount(byte.long(), minlength=256) - 781.25).abs().max() < 5 * 28


def test_neighbours_hardly_correlate():
    """The module's docstring states 1/256 for draws that share a byte; all others are independent."""
    draws = random.dither(6, 0, 4_000_000).double() - 128.5
    noise = 5 / 2000  # five standard errors
    for distance in range(1, 9):
        correlation = float((draws[:-distance] * draws[distance:]).mean() * 12)
        # three of four neighbours share a byte of a word, and so do its first and its last element
        shared = {1: 3 / 4, 3: 1 / 4}.get(distance, 0.0)
        assert abs(correlation - shared / 256) < noise, distance


@pytest.mark.parametrize("base", [128, 129, 191])
@given(whole=st.integers(0, 63), fraction=st.integers(0, 2**17 - 1))
def test_values_are_rounded_up_as_often_as_they_should_be(base, whole, fraction):
    """As many of all 2**16 draws round a value up as its fraction says, and none rounds an integer up."""
    value = torch.tensor(whole + fraction / 2**17)
    dither = base + torch.arange(2**16) / 2**16
    rounded = random.rounded_at_random(value, dither, 7) - (base - 128)
    assert set(rounded.tolist()) <= {whole, whole + 1}
    assert abs(int((rounded > whole).sum()) - fraction / 2) <= 0.5


@pytest.mark.parametrize("bits", range(1, 8))
def test_rounding_errors_do_not_change_integers(bits):
    """Values that exceed the largest integer by a rounding error are that integer, and negative ones count from 0."""
    largest, dither = 2.0**bits - 1, 128 + torch.arange(2**16) / 2**16
    for value in (largest, largest + 2.0**-18 if bits < 6 else largest, 0.0, 2.0**-18):
        rounded = random.rounded_at_random(torch.tensor(value), dither, bits)
        assert rounded.unique().tolist() == [round(value)]
    below = random.rounded_at_random(torch.tensor(-1.0), dither + 1, bits)
    assert below.unique().tolist() == [0]


@triton.jit
def _dither_kernel(out_ptr, seed, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BASE: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + offsets, random.dither_tile(seed, tl.cast(first, tl.int64), ROWS, COLUMNS, BASE))


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@cases("seed", [0, 1, 16, 123456789, -1, -77, 2**31, 2**32 - 1, 2**40 + 1, 2**63 - 1, -(2**63)])
@cases("first", [0, 16, 2048, 2**31, 2**36 - 32, 2**37])
@cases("base", [128, 129])
def test_triton_draws_what_torch_draws(implementation, seed, first, base):
    rows, columns = 4, 32
    out = torch.empty(rows, columns, device=implementation.device)
    _dither_kernel[(1,)](out, seed, first, rows, columns, base)
    assert torch.equal(out.cpu().flatten(), random.dither(seed, first, rows * columns, base))
