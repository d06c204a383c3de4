"""RandomK: payloads can be summed, and the positions follow from the seed."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from gckernels import RandomK, chunk_numel
from gckernels.ops.randomk import begins, positions
from gckernels.ops.randomk.header import MAX_WORLD, header, seed_of
from gckernels.ops.randomk.positions_kernels import places_of, reciprocal, start_of
from gckernels.toolkit.random import philox
from helpers import HOST_PARAM, KERNEL_PARAM, assert_equal, decode, decode_one, encode

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(seed=SEEDS, count=st.integers(1, MAX_WORLD))
def test_the_sum_of_headers_tells_the_seed(seed, count):
    total = torch.zeros(8)
    for power in range(14):  # sums of partial sums, in as many additions as needed
        total += header(seed) * (count & 1 << power)
    assert total[0] == count
    assert seed_of(total) == seed % 2**64


@given(numel=st.integers(0, 3000), ratio=st.floats(1e-4, 1.0), seed=SEEDS)
def test_positions_are_distinct_inside_and_ascend_around_the_ring(numel, ratio, seed):
    k = RandomK(ratio).capacity(numel)
    places = positions(numel, k, seed)
    assert places.numel() == places.unique().numel() == k
    assert ((places >= 0) & (places < numel)).all()
    assert (places[:-1].diff() > 0).all()
    if k > 1:
        assert places[-1] > places[-2] or places[-1] < places[0]


@pytest.mark.parametrize("numel", [1, 2, 7, 12, 30])
def test_every_element_has_the_same_probability(numel):
    """Over all shifts, an element is sent with probability exactly k / n: one over the size of its group."""
    for k in range(1, numel + 1):
        probability = [Fraction(0)] * numel
        for shift in range(numel):
            bounds = begins(numel, k, shift).tolist()
            assert bounds[-1] - bounds[0] == numel
            for first, end in itertools.pairwise(bounds):
                assert end - first in (numel // k, -(-numel // k))
                for place in range(first, end):
                    probability[place % numel] += Fraction(1, (end - first) * numel)
        assert probability == [Fraction(k, numel)] * numel


@given(number=st.integers(0, 2**62 - 1), divisor=st.integers(1, 2**31))
def test_kernels_divide_by_a_product(number, divisor):
    quotient = (number * (reciprocal(divisor) % 2**64)) >> 64
    assert number // divisor == quotient + (number - quotient * divisor >= divisor)
    assert -(2**63) <= reciprocal(divisor) < 2**63


@triton.jit
def _places_kernel(out_ptr, seed, first, shift, size, k, inverse_k, LANES: tl.constexpr):
    seed, first, shift, size, k = (tl.full((), each, tl.int64) for each in (seed, first, shift, size, k))
    begin, rest = start_of(first, shift, size, k, inverse_k)
    lanes = tl.arange(0, LANES)
    groups = (first + lanes).to(tl.uint32)
    places = places_of(seed, groups, lanes.to(tl.int64), begin, rest, size, k, size // k, inverse_k)
    tl.store(out_ptr + lanes, places.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@given(
    size=st.one_of(st.integers(1, 2**31 - 1), st.integers(2**31 - 5000, 2**31 - 1)),
    share=st.one_of(st.just(1.0), st.floats(0, 1)),
    first=st.floats(0, 1),
    shift=st.floats(0, 1, exclude_max=True),
    seed=SEEDS,
)
@settings(max_examples=30)
def test_positions_in_units_of_any_size(implementation, size, share, first, shift, seed):
    """Kernels compute positions with 32 bits from the start of a first group."""
    k, lanes = max(1, int(size * share)), 4096
    shift, first = int(shift * size), int(first * (k - 1))
    places = torch.empty(lanes, dtype=torch.int32, device=implementation.device)
    _places_kernel[(1,)](places, seed, first, shift, size, k, reciprocal(k), lanes)
    groups = range(first, min(first + lanes, k))
    words = philox(seed, torch.tensor(groups))[:, 0].tolist()
    begins = [(group * size + shift) // k for group in range(first, groups[-1] + 2)]
    bounds = itertools.pairwise(begins)
    want = [begin + (word * (end - begin) >> 32) for word, (begin, end) in zip(words, bounds, strict=True)]
    got = places[: len(groups)].tolist()
    assert [place % 2**32 for place in got] == want


@pytest.mark.parametrize(("numel", "k"), [(40, 10), (100, 75), (41, 10), (17, 16)])
def test_every_element_is_as_likely_as_any_other(numel, k):
    draws = 1000
    counts = torch.zeros(numel)
    for seed in range(draws):
        counts[positions(numel, k, seed)] += 1
    expected, variance = draws * k / numel, draws * k / numel * (1 - k / numel)
    # Each count is binomial. One of the 198 elements of all cases exceeds 6 deviations in about one of a million
    # choices of the seeds.
    assert ((counts - expected).abs() < 6 * variance**0.5).all()


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(
    ("numel", "ratio", "chunks"),
    [
        (2, 0.5, 1),
        (100, 0.3, 3),
        (2049, 0.9, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, 0.4, 1), (2048, 0.6, 1)]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(5000, 1e-3, 2), (5000, 1.0, 1)]),
    ],
)
@IMPLEMENTATIONS
def test_entries_are_at_the_positions(implementation, numel, ratio, chunks, around):
    """This holds if the last group wraps around the end, and in the last chunk, which is not full."""
    compressor, size = RandomK(ratio), chunk_numel(numel, chunks)
    k = compressor.capacity(size)
    drawn = ((seed, positions(size, k, seed)) for seed in range(500))
    seed, places = next((drawn for drawn in drawn if bool(drawn[1][-1] < drawn[1][0]) == around), (None, None))
    if seed is None:
        assert around and size % k == 0  # groups of equal size never wrap around
        return
    grad, sent = torch.arange(1.0, numel + 1), torch.zeros(chunks * size)
    for chunk in range(chunks):
        sent[chunk * size + places] = 1.0
    payload, kept = encode(implementation, compressor, grad, torch.zeros(numel), chunks, seed=seed)
    want = grad * sent[:numel]
    assert_equal(decode(implementation, compressor, payload, torch.empty(numel)), want)
    assert_equal(kept, grad - want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("world", [2, 3, 7])
def test_the_sum_of_payloads_is_the_payload_of_the_mean(implementation, world):
    compressor, numel, seed = RandomK(ratio=0.1), 5000, 2**63 - 12345
    grads = torch.randn(world, numel)
    total = torch.zeros(compressor.payload_nbytes(numel) // 4)
    for grad in grads:
        payload, _ = encode(implementation, compressor, grad, torch.zeros(numel), seed=seed, scale=1 / world)
        total += payload[0].view(torch.float32)
    decoded = decode(implementation, compressor, total.view(torch.uint8), torch.empty(numel))
    places = positions(numel, 500, seed)
    expected = torch.zeros(numel)
    for grad in grads:
        expected[places] += (grad * (1 / world))[places]
    assert_equal(decoded, expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("place", "value"), [(0, 0.0), (0, 2.0), (0, 1.5), (1, 0.5), (3, -1.0), (7, 1.0), (2, torch.nan)]
)
def test_a_damaged_header_decodes_to_nan(implementation, place, value):
    """The damage: a number of payloads that does not divide the seed, a value that is no integer, no seed or no
    zero."""
    compressor, numel = RandomK(), 3000
    payload, _ = encode(implementation, compressor, torch.randn(numel), seed=1)
    assert torch.isfinite(decode_one(compressor, payload, numel)).all()
    payload.view(torch.float32)[0, place] = value
    assert decode(implementation, compressor, payload, torch.empty(numel)).isnan().all()


@IMPLEMENTATIONS
def test_what_is_not_finite_spoils_every_value(implementation):
    """This holds even if the bad value would not have been sent. The residual keeps its old values there and at the
    entries."""
    compressor, numel = RandomK(ratio=0.01), 10_000
    places = positions(numel, 100, 0)
    where = next(place for place in range(numel) if place not in places)
    grad, residual = torch.randn(numel), torch.randn(numel)
    grad[where] = torch.inf
    payload, kept = encode(implementation, compressor, grad, residual)
    decoded = decode_one(compressor, payload, numel)
    assert_equal(decoded.isnan().nonzero()[:, 0], places)
    expected = grad + residual
    expected[where] = residual[where]
    expected[places] = residual[places]
    assert_equal(kept, expected)
