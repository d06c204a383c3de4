"""Entries on the wire: the number of bits, their values, and how decoders treat bits that no encoder wrote."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gckernels import GradDrop, MSTopK, Threshold, TopK, chunk_numel, from_spec
from gckernels.toolkit.sparsifier.entries import BLOCK, SPAN, EntryFormat, low_bits
from helpers import (
    HOST,
    HOST_PARAM,
    INTERPRETED_SLOWLY,
    KERNEL_PARAM,
    REFERENCE,
    REFERENCE_PARAM,
    assert_equal,
    decode,
    encode,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])

# -------------------------------------------------------------------- number of bits


def entropy(numel: int, k: int) -> float:
    """The bits per entry that identify one of all choices of ``k`` of ``numel`` elements."""
    return (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2) / k


@pytest.mark.parametrize(
    ("ratio", "k", "low", "highs_nbytes", "lows_nbytes"),
    [
        (0.001, 16_778, 9, 6_208, 18_880),  # 16,778 + 2**15 bits, 9 * 16,778 bits, padded to 16 bytes
        (0.01, 167_773, 6, 53_744, 125_840),  # 167,773 + 2**18
        (0.1, 1_677_722, 3, 471_872, 629_152),  # 1,677,722 + 2**21
    ],
)
@pytest.mark.parametrize("value_bits", [32, 16, 8, 4, 2])
def test_bytes_per_entry(ratio, k, low, highs_nbytes, lows_nbytes, value_bits):
    """Sizes for 2**24 elements are exact. An index takes at most 0.6 bits more than the entropy. A value takes
    ``value_bits`` and, with scales, half a bit more."""
    compressor, numel = TopK(ratio=ratio, value_bits=value_bits), 2**24
    layout = compressor.layout(numel)
    assert compressor.entries.low == low
    assert layout["highs"].nbytes == highs_nbytes
    assert layout["lows"].nbytes == lows_nbytes
    assert (highs_nbytes + lows_nbytes) * 8 / k < entropy(numel, k) + 0.6
    bits = value_bits + 0.5 if value_bits < 16 else value_bits
    values_nbytes = compressor.payload_nbytes(numel) - 16 - highs_nbytes - lows_nbytes
    assert k * bits / 8 <= values_nbytes < k * bits / 8 + 36  # two fields' padding, and a scale for a part of a block


@pytest.mark.parametrize("density", [1 / 3000, 0.0007, 0.003, 0.007, 0.03, 0.05, 0.08, 0.15, 0.2])
def test_indices_are_near_the_entropy(density):
    numel = 10**9
    k = round(numel * density)
    low = low_bits(k, numel)
    assert low + 1 + numel / 2**low / k < entropy(numel, k) + 0.7


@given(parts=st.integers(1, 10**9))
def test_low_bits_are_the_best(parts):
    costs = [parts * (low + 1) + Fraction(10**9, 2**low) for low in range(12)]
    assert costs[low_bits(parts, 10**9)] == min(costs)


# -------------------------------------------------------------------- values of the bits


@st.composite
def choices(draw) -> tuple[int, int, list[int], EntryFormat]:
    """``(numel, k, indices, format)`` with at most k indices."""
    numel = draw(st.integers(1, 3 * SPAN))
    indices = sorted(draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 150))))
    k = draw(st.integers(max(1, len(indices)), numel))
    return numel, k, indices, EntryFormat(draw(st.integers(0, 11)), draw(st.sampled_from([32, 16, 8, 4, 2])))


@given(choices())
def test_bits_are_where_the_definition_has_them(choice):
    """The strings equal Python integers made from the definition, and reading returns the entries."""
    numel, k, indices, code = choice
    values = torch.arange(1.0, len(indices) + 1)
    payload = code.write(torch.tensor(indices, dtype=torch.int64), values, numel, k)
    layout = code.layout(numel, k)
    highs = sum(1 << (entry + (index >> code.low)) for entry, index in enumerate(indices))
    lows = sum((index % 2**code.low) << (entry * code.low) for entry, index in enumerate(indices))
    for name, string in (("highs", highs), ("lows", lows)):
        field = layout[name]
        found = payload[field.offset : field.offset + field.nbytes].numpy().tobytes()
        assert int.from_bytes(found, "little") == string
    found, kept, wrong = code.read(payload, numel, k)
    assert found.tolist() == indices
    assert not wrong.any()
    if code.value_bits >= 16:  # all of these small integers are exact in bf16
        assert kept.tolist() == values.tolist()


def test_a_scale_for_every_block():
    """The scale is the largest magnitude, or the mean magnitude, of a block's 64 entries; the last block may have
    fewer."""
    numel, count = 1000, BLOCK + 3
    values = torch.cat((torch.full((BLOCK,), -3.0), torch.tensor([7.0, -3.5, 1.75])))
    expected = {
        8: ((3 / 127, 7 / 127), None),
        4: ((3 / 7, 1.0), [7.0, -4.0, 2.0]),
        2: ((3.0, 12.25 / 3), [12.25 / 3, -12.25 / 3, 0.0]),
    }
    for value_bits, (scales, rest) in expected.items():
        code = EntryFormat(3, value_bits)
        payload = code.write(torch.arange(count), values, numel, 100)
        found = code.layout(numel, 100).view(payload, "scales")
        torch.testing.assert_close(found, torch.tensor(scales), rtol=2**-23, atol=0)
        _, decoded, _ = code.read(payload, numel, 100)
        torch.testing.assert_close(decoded[:BLOCK], values[:BLOCK], rtol=2**-22, atol=0)
        if rest:
            torch.testing.assert_close(decoded[BLOCK:], torch.tensor(rest), rtol=2**-22, atol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("value_bits", [16, 8, 4, 2])
def test_what_is_not_finite_spoils_its_block_alone(implementation, value_bits):
    """The 64 entries of the block decode to NaN and keep their old residual; with 16 bits it is the one entry."""
    compressor, numel = Threshold(tau=0.0, ratio=1.0, value_bits=value_bits), 300
    gradient, residual = torch.randn(numel), torch.randn(numel)
    gradient[100] = torch.inf
    payload, kept = encode(implementation, compressor, gradient, residual)
    decoded = decode(implementation, compressor, payload, torch.empty(numel))
    damaged = range(100, 101) if value_bits == 16 else range(BLOCK, 2 * BLOCK)
    assert (~decoded.isfinite()).nonzero()[:, 0].tolist() == list(damaged)
    assert torch.equal(kept[damaged], residual[damaged])
    assert (kept != residual).sum() == numel - len(damaged)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("cls", "value_bits"),
    [
        # their decoders share one kernel, which differs by the bits
        pytest.param(cls, value_bits, marks=[INTERPRETED_SLOWLY] if cls is not TopK else [])
        for cls in (TopK, MSTopK, GradDrop, Threshold)
        for value_bits in (16, 8, 4, 2)
    ],
)
def test_merged_payloads_are_the_sum(implementation, cls, value_bits):
    """The sources have some entries in common, and these cover several spans and chunks."""
    compressor = cls(ratio=0.05, value_bits=value_bits)
    numel, chunks = 2 * SPAN + 100, 2
    common = torch.randn(numel)
    payloads = [encode(REFERENCE, compressor, common + torch.randn(numel) / 2, None, chunks)[0] for _ in range(3)]
    total = torch.zeros(numel)
    for payload in payloads:
        total += decode(REFERENCE, compressor, payload, torch.empty(numel))
    assert_equal(decode(implementation, compressor, torch.stack(payloads), torch.empty(numel)), total)


# -------------------------------------------------------------------- bits that no encoder wrote


def put(payload: torch.Tensor, compressor, size: int, entries: list[tuple[int, int]]) -> None:
    """Overwrite the indices of a payload with ``entries``, each ``(group, low)``, in the given order."""
    code, layout = compressor.entries, compressor.layout(size)
    highs = sum(1 << (entry + group) for entry, (group, _) in enumerate(entries))
    lows = sum(low << (entry * code.low) for entry, (_, low) in enumerate(entries))
    for name, string in (("highs", highs), ("lows", lows)):
        field = layout.view(payload, name).view(torch.uint8)
        field.copy_(torch.frombuffer(bytearray(string.to_bytes(field.numel(), "little")), dtype=torch.uint8))


@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
@pytest.mark.parametrize("entries", [[(40, 5), (40, 5)], [(40, 5), (40, 4)], [(40, 5), (40, 7), (40, 6), (40, 7)]])
def test_entries_out_of_order_make_their_span_nan(implementation, entries):
    """Other spans are not affected. Groups have 64 elements, so group 40 is in the second span."""
    compressor, numel = TopK(), 3 * SPAN
    payload, _ = encode(REFERENCE, compressor, torch.ones(numel))
    assert compressor.entries.low == 6
    put(payload[0], compressor, numel, [(0, 3), *entries, (95, 63)])
    want = torch.zeros(numel)
    want[3] = want[-1] = 1.0
    want[SPAN : 2 * SPAN] = torch.nan
    assert_equal(decode(implementation, compressor, payload, torch.empty(numel)), want)


@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
def test_an_entry_outside_the_chunk_is_passed_over(implementation):
    """The entries lie past the last element, in its group and in a later one."""
    compressor, numel = TopK(ratio=0.05), 100
    payload, _ = encode(REFERENCE, compressor, torch.ones(numel))
    assert compressor.entries.low == 4
    put(payload[0], compressor, numel, [(0, 1), (6, 3), (6, 4), (20, 0)])
    want = torch.zeros(numel)
    want[1] = want[99] = 1.0
    assert_equal(decode(implementation, compressor, payload, torch.empty(numel)), want)


@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
def test_more_entries_than_there_is_room_for(implementation):
    """The span of the first surplus entry is NaN."""
    compressor, numel = TopK(ratio=0.001), 2 * SPAN
    payload, _ = encode(REFERENCE, compressor, torch.ones(numel))
    assert (compressor.entries.low, compressor.capacity(numel)) == (9, 5)
    put(payload[0], compressor, numel, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)])
    highs = compressor.layout(numel).view(payload[0], "highs")
    highs[0] |= 1 << 10  # an entry more, after five zeros, in the second span
    want = torch.zeros(numel)
    want[1:6] = 1.0
    want[SPAN:] = torch.nan
    assert_equal(decode(implementation, compressor, payload, torch.empty(numel)), want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("fill", [0, 0x55, 0xFF])
@pytest.mark.parametrize("spec", ["TopK", "Threshold(tau=0.0, ratio=1.0)", "TopK(ratio=0.25, value_bits=4)"])
def test_strings_of_one_kind(implementation, fill, spec):
    """The strings have no entries, as many entries as groups, or nothing but entries."""
    compressor, numel = from_spec(spec), 2 * SPAN + 5
    payload, _ = encode(REFERENCE, compressor, torch.randn(numel))
    compressor.layout(numel).view(payload[0], "highs").view(torch.uint8).fill_(fill)
    got = decode(implementation, compressor, payload, torch.empty(numel))
    assert_equal(got, decode(REFERENCE, compressor, payload, torch.empty(numel)))


def check_damaged(implementation, compressor, numel: int, chunks: int, flips: int) -> torch.Tensor:
    """Flip bits after the status word, assert that the decoded values equal the reference's, and return them."""
    payload, _ = encode(REFERENCE, compressor, torch.randn(numel), None, chunks)
    for row in payload:
        for place in torch.randint(32, 8 * row.numel(), (flips,)).tolist():
            row[place // 8] ^= 1 << (place % 8)
    got = decode(implementation, compressor, payload, torch.empty(numel))
    assert_equal(got, decode(REFERENCE, compressor, payload, torch.empty(numel)))
    return got


DAMAGED = [TopK(ratio=0.05), TopK(ratio=0.25, value_bits=4), Threshold(ratio=1.0), MSTopK(ratio=0.001, value_bits=16)]


@pytest.mark.parametrize("compressor", DAMAGED, ids=repr)
@pytest.mark.parametrize("flips", [1, 3, 30])
def test_flipped_bits_on_the_host(compressor, flips):
    for _ in range(30):
        check_damaged(HOST, compressor, 3 * SPAN + 77, 2, flips)


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@pytest.mark.parametrize("compressor", DAMAGED, ids=repr)
@pytest.mark.parametrize("flips", [1, 10])
def test_flipped_bits_in_the_kernel(implementation, compressor, flips):
    check_damaged(implementation, compressor, 3 * SPAN + 77, 2, flips)


@IMPLEMENTATIONS
def test_short_shards(implementation):
    """The string is laid out for more elements than there are, and ends within a span."""
    compressor, numel, size = TopK(ratio=0.1, value_bits=8), SPAN + 100, 3 * SPAN
    assert chunk_numel(numel, 1) < size
    grad, residual = torch.randn(numel), torch.randn(numel)
    payload, kept = encode(implementation, compressor, grad, residual, size=size)
    want, left = encode(REFERENCE, compressor, grad, residual, size=size)
    assert torch.equal(payload, want)
    assert torch.equal(kept, left)
    decoded = decode(implementation, compressor, payload, torch.empty(numel), size=size)
    assert_equal(decoded, decode(REFERENCE, compressor, want, torch.empty(numel), size=size))
