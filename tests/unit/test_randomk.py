"""RandomK: payloads that add up, places that follow from a seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gckernels import RandomK
from gckernels.ops.randomk import positions
from gckernels.ops.randomk_header import LARGEST_WORLD, header, seed_of
from helpers import HOST_PARAM, KERNEL_PARAM, assert_equal, decode, decode_one, encode

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(seed=SEEDS, count=st.integers(1, LARGEST_WORLD))
def test_the_sum_of_headers_tells_the_seed(seed, count):
    total = torch.zeros(8)
    for power in range(14):  # as many additions as it takes, of partial sums
        total += header(seed) * (count & 1 << power)
    assert total[0] == count
    assert seed_of(total) == seed % 2**64


@given(numel=st.integers(0, 3000), ratio=st.floats(1e-4, 1.0), seed=SEEDS)
def test_positions_are_distinct_ascending_and_inside(numel, ratio, seed):
    k = RandomK(ratio).capacity(numel)
    places = positions(numel, k, seed)
    assert places.numel() == k
    assert (places.diff() > 0).all()
    assert ((places >= 0) & (places < numel)).all()


def test_every_element_is_as_likely_as_any_other():
    numel, k, draws = 40, 10, 4000
    counts = torch.zeros(numel)
    for seed in range(draws):
        counts[positions(numel, k, seed)] += 1
    expected = draws * k / numel
    # sum of (observed - expected)**2 / expected: 3 degrees of freedom for each of 10 groups, of which
    # 1 in 10**6 exceeds 83
    assert ((counts - expected) ** 2 / expected).sum() < 83


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
    """A number of payloads that does not divide the seed, what is no integer, no seed or no zero."""
    compressor, numel = RandomK(), 3000
    payload, _ = encode(implementation, compressor, torch.randn(numel), seed=1)
    assert torch.isfinite(decode_one(compressor, payload, numel)).all()
    payload.view(torch.float32)[0, place] = value
    assert decode(implementation, compressor, payload, torch.empty(numel)).isnan().all()


@IMPLEMENTATIONS
def test_what_is_not_finite_spoils_every_value(implementation):
    """Also where nothing would have been sent; everything else of the residual goes on, but for the entries."""
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
