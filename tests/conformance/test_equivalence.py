"""The host path and the kernels equal the reference in every byte, residual and decoded value."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from configurations import (
    DEFAULTS,
    INTERPRETED_IN_ALL,
    INTERPRETED_IN_KINDS,
    QUICK,
    assert_payloads_equal,
    expected_residual,
    parametrize,
)
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from cases import cases
from gckernels import chunk_numel
from gckernels.toolkit.reference import last_state
from helpers import (
    GRADIENTS,
    HOST,
    HOST_PARAM,
    INTERPRETED_SLOWLY,
    KERNEL_PARAM,
    LARGE_SIZE,
    NON_FINITE,
    REFERENCE,
    SIZES,
    assert_equal,
    decode,
    encode,
    random_residual,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_encode(implementation, compressor, grad, residual, chunks=1, seed=0, scale=1.0, size=None) -> torch.Tensor:
    """Assert that payload and residual equal the reference's, and return the payload."""
    size = chunk_numel(grad.numel(), chunks) if size is None else size
    got, kept = encode(implementation, compressor, grad, residual, chunks, seed, scale, size)
    want, _ = encode(REFERENCE, compressor, grad, residual, chunks, seed, scale, size)
    values = grad.float()
    if residual is not None:
        values = last_state(compressor.accumulate(values, residual), grad.numel())
    assert_payloads_equal(compressor, size, got, want, values, seed)
    if residual is not None:
        # the expected residual is computed from the payload that was written, so it is exact
        assert_equal(kept, expected_residual(compressor, grad, residual, got, size, scale), "residual")
    return got


def check_decode(implementation, compressor, payloads, out, scale=1.0, accumulate=False, size=None) -> None:
    """Assert that the decoded values equal the reference's."""
    got = decode(implementation, compressor, payloads, out, scale, accumulate, size)
    assert_equal(got, decode(REFERENCE, compressor, payloads, out, scale, accumulate, size), "decoded")


@IMPLEMENTATIONS
@parametrize()
@cases(
    "numel",
    [pytest.param(numel, marks=INTERPRETED_IN_KINDS if numel != 1025 else INTERPRETED_IN_ALL) for numel in SIZES],
)
def test_sizes(compressor, implementation, numel):
    """A unit is encoded with feedback as one payload, and decoded by adding to existing values."""
    payload = check_encode(implementation, compressor, torch.randn(numel), random_residual(compressor, numel))
    check_decode(implementation, compressor, payload, torch.randn(numel), scale=0.25, accumulate=True)


@INTERPRETED_SLOWLY
@IMPLEMENTATIONS
@parametrize(among=DEFAULTS)
def test_large_size(compressor, implementation):
    """The unit takes many programs and many tiles."""
    payload = check_encode(implementation, compressor, torch.randn(LARGE_SIZE), random_residual(compressor, LARGE_SIZE))
    check_decode(implementation, compressor, payload, torch.empty(LARGE_SIZE))


@IMPLEMENTATIONS
@parametrize(quick=QUICK)
@cases(
    ("numel", "chunks"),
    [
        *(pytest.param(*each, marks=INTERPRETED_IN_KINDS) for each in ((5, 3), (5000, 3))),
        *(pytest.param(*each, marks=INTERPRETED_SLOWLY) for each in ((0, 3), (20, 3), (1000, 8))),
    ],
)
def test_chunks(compressor, implementation, numel, chunks):
    """The unit is cut into chunks, of which the last are short or empty."""
    payload = check_encode(implementation, compressor, torch.randn(numel), random_residual(compressor, numel), chunks)
    check_decode(implementation, compressor, payload, torch.empty(numel))


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
@cases("numel", [0, 4096])
def test_payload_with_room_to_spare(compressor, implementation, numel):
    """The payload is laid out for more elements than there are, as for the short last shard of a unit."""
    payload = check_encode(
        implementation, compressor, torch.randn(numel), random_residual(compressor, numel), size=4112
    )
    check_decode(implementation, compressor, payload, torch.empty(numel), size=4112)


NASTIEST = {"one_huge": (), "nan": (), "denormals": INTERPRETED_IN_KINDS, "ties": INTERPRETED_IN_KINDS}
"""The cases in which ``make test`` interprets every default kernel, or one for every text; ``make test-slow`` has the
others."""


@IMPLEMENTATIONS
@parametrize()
@cases(
    "name",
    [pytest.param(name, marks=NASTIEST.get(name, INTERPRETED_SLOWLY)) for name in (*GRADIENTS, *NON_FINITE)],
)
def test_nasty_gradients(compressor, implementation, name):
    """The first encoding has no feedback, so that nothing is added to the nasty values; the second has feedback."""
    numel = 333
    grad = (GRADIENTS | NON_FINITE)[name](numel)
    check_encode(implementation, compressor, grad, None)
    payload = check_encode(implementation, compressor, grad, random_residual(compressor, numel) / 8)
    check_decode(implementation, compressor, payload, torch.empty(numel))


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
@cases("dtype", DTYPES)
def test_dtypes(compressor, implementation, dtype):
    """Inputs and outputs are fp32, bf16 and fp16, with subnormals and overflow; statistics stay in fp32."""
    grad = torch.randn(1025).to(dtype)
    grad[::9] *= torch.finfo(dtype).tiny / 4
    payload = check_encode(implementation, compressor, grad, random_residual(compressor, 1025))
    out = torch.randn(1025).to(dtype)
    check_decode(implementation, compressor, payload, out, scale=1 / 3, accumulate=True)
    check_decode(implementation, compressor, payload, out, scale=1e6)  # fp16 overflows to inf


@IMPLEMENTATIONS
@parametrize(lambda compressor: compressor.traits.summable)
@cases("scale", [0.5, 1 / 3, 7.0])
def test_scale(compressor, implementation, scale):
    """Summable compressors scale the values that they send, and keep the residual in units of the gradient."""
    check_encode(implementation, compressor, torch.randn(1025), random_residual(compressor, 1025), scale=scale)
    check_encode(implementation, compressor, torch.randn(100), None, chunks=3, scale=scale)


@IMPLEMENTATIONS
@parametrize()
def test_sum_that_overflows(compressor, implementation):
    """Gradient and residual are finite, but their sum is not."""
    grad, residual = torch.randn(300), random_residual(compressor, 300)
    grad[7] = residual[7::300] = 3e38
    payload = check_encode(implementation, compressor, grad, residual)
    check_decode(implementation, compressor, payload, torch.empty(300))


LARGE, SMALL = 2.0**119, 2.0**-122  # a sum of 200 of these cannot overflow, in any order; half are subnormal
FLOATS = st.floats(-LARGE, LARGE, width=32) | st.floats(-SMALL, SMALL, width=32) | st.sampled_from([0.0, -0.0, 1.0])
NON_FINITE_FLOATS = FLOATS | st.sampled_from([np.nan, np.inf, -np.inf])


def gradients(elements) -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(np.float32, st.integers(0, 200), elements=elements)


@parametrize(quick=QUICK)
@settings(max_examples=10)  # per configuration
@given(values=gradients(FLOATS), chunks=st.integers(1, 4), feedback=st.booleans())
def test_any_finite_gradient(compressor, values, chunks, feedback):
    grad = torch.from_numpy(values)
    residual = grad.flip(0).repeat(compressor.traits.states) if feedback else None
    payload = check_encode(HOST, compressor, grad, residual, chunks)
    check_decode(HOST, compressor, payload, torch.empty(grad.numel()))


@parametrize(quick=QUICK)
@settings(max_examples=10)
@given(values=gradients(NON_FINITE_FLOATS), chunks=st.integers(1, 4))
def test_any_gradient(compressor, values, chunks):
    grad = torch.from_numpy(values)
    payload = check_encode(HOST, compressor, grad, torch.ones(compressor.traits.states * grad.numel()), chunks)
    check_decode(HOST, compressor, payload, torch.empty(grad.numel()))


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@parametrize()
def test_any_gradient_in_the_kernel(compressor, implementation):
    """The kernel gets the same mixture as one large gradient, for the interpreter is slow per call, not per element."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)  # bits of every exponent, NaN and inf
    grad = torch.from_numpy(np.where(np.abs(bits) > 1e34, np.sign(bits), bits).astype(np.float32))
    grad[2500::100] = torch.nan
    payload = check_encode(implementation, compressor, grad, None, chunks=3)
    check_decode(implementation, compressor, payload, torch.empty(grad.numel()))
