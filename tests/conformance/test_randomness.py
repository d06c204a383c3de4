"""The same seed gives the same bytes, and unbiased compressors are unbiased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import triton
import triton.language as tl
from configurations import CONFIGURATIONS, KINDS, assert_payloads_equal, parametrize

from cases import cases
from gckernels import Traits, chunk_numel
from gckernels.codec import Decoding, Encoding
from gckernels.toolkit.quantizer import Dual, MapQuantizer, Maps
from gckernels.toolkit.quantizer.statistics import LARGEST_MAGNITUDE
from gckernels.toolkit.sparsifier import Sparsifier
from helpers import (
    HOST,
    HOST_PARAM,
    INTERPRETED_SLOWLY,
    KERNEL,
    KERNEL_PARAM,
    REFERENCE,
    Implementation,
    decode_one,
    encode,
    interpreted,
    random_residual,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
NUM_SEEDS = 2000


@triton.jit
def _ternary(values, stats, dither, C: tl.constexpr):
    return tl.where((dither - 128.0) * stats[0] < tl.abs(values), tl.where(values > 0, 2, 1), 0)


def _ternary_torch(values, stats, dither, C):
    return torch.where((dither - 128.0) * stats[0] < values.abs(), torch.where(values > 0, 2, 1), 0)


def _ternary_value(codes, stats, C):
    return torch.where(codes == 0, stats[0] * 0.0, torch.where(codes == 2, stats[0], -stats[0]))


@dataclass(frozen=True)
class Ternary(MapQuantizer):
    """Plus or minus the largest magnitude with probability ``abs(value) / largest``, else 0. It is not registered: it
    tests the toolkit's random numbers independently of the package's compressors."""

    traits = Traits(stochastic=True)
    bits: ClassVar[int] = 2
    block: int | None = None
    maps = Maps(
        quantize=Dual(_ternary_torch, _ternary),
        dequantize=_ternary_value,
        statistic=LARGEST_MAGNITUDE,
    )


STOCHASTIC = {spec: c for spec, c in CONFIGURATIONS.items() if c.traits.stochastic} | {
    "toolkit": Ternary(),
    "toolkit-blocks": Ternary(block=128),
}
DRAWING = {spec: c for spec, c in STOCHASTIC.items() if not isinstance(c, Sparsifier)}  # sparsifiers draw samples
UNBIASED = {spec: c for spec, c in STOCHASTIC.items() if c.traits.unbiased or spec == "toolkit"}


@pytest.mark.parametrize(
    ("compressor", "implementation"),
    [(compressor, HOST) for compressor in CONFIGURATIONS.values()]
    # test_equivalence.py compares the kernels whose bytes do not depend on the seed
    + [pytest.param(c, KERNEL, marks=KERNEL_PARAM.marks) for c in CONFIGURATIONS.values() if c.traits.stochastic],
    ids=lambda value: value.name if isinstance(value, Implementation) else str(value),
)
def test_same_arguments_give_the_same_bytes(compressor, implementation):
    # enough elements for a sample to leave some out
    grad, residual = torch.randn(10_000), random_residual(compressor, 10_000)
    grad[::3] = residual.view(-1, 10_000)[:, ::3] = 0  # some compressors draw for zeros only
    once = encode(implementation, compressor, grad, residual, chunks=2, seed=7)
    again = encode(implementation, compressor, grad, residual, chunks=2, seed=7)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])
    other, _ = encode(implementation, compressor, grad, residual, chunks=2, seed=8)
    assert torch.equal(once[0], other) != compressor.traits.stochastic, "`stochastic` is wrong"


@interpreted([*KINDS.values(), Ternary()])
@IMPLEMENTATIONS
@pytest.mark.parametrize("compressor", STOCHASTIC.values(), ids=STOCHASTIC)
@cases(
    "seed",
    [
        *(0, -5, 2**31, 2**63 - 1),
        *(pytest.param(seed, marks=INTERPRETED_SLOWLY) for seed in (1, 16, -1, 2**32 - 1, -(2**63))),
    ],
)
def test_kernel_and_host_draw_the_references_numbers(compressor, implementation, seed):
    """This holds for any 64-bit seed, in whatever integer type a launch passes it, and for any chunk."""
    grad = torch.randn(300)
    got, _ = encode(implementation, compressor, grad, None, chunks=3, seed=seed)
    want, _ = encode(REFERENCE, compressor, grad, None, chunks=3, seed=seed)
    assert_payloads_equal(compressor, chunk_numel(300, 3), got, want, grad, seed)


@pytest.mark.parametrize("compressor", UNBIASED.values(), ids=UNBIASED)
def test_unbiased(compressor):
    """For every element, the mean over many seeds is within four standard errors of the gradient."""
    grad = torch.randn(40)
    payload = torch.empty(1, 1, compressor.payload_nbytes(40), dtype=torch.uint8)
    decoded = torch.empty(NUM_SEEDS, 40)
    for seed in range(NUM_SEEDS):  # not through the helpers, whose memory checks would take most of the time
        compressor.host.encode(Encoding(compressor, grad, None, payload[0], seed, 40))
        compressor.host.decode(Decoding(compressor, payload, decoded[seed], 40))
    samples = decoded.double()
    error = (samples.mean(0) - grad).abs()
    standard_error = samples.std(0) / NUM_SEEDS**0.5
    # A probability is exact to half a step of the random numbers, times the distance between two levels, which is at
    # most the largest decoded value. An element that always decodes to the same value may be rounded.
    resolution = 2.0**-17 * samples.abs().max()
    assert (error <= 4 * standard_error + resolution + 2.0**-23 * grad.abs()).all()


@pytest.mark.parametrize("compressor", DRAWING.values(), ids=DRAWING)
def test_elements_draw_independently(compressor):
    """Equal elements do not all get the same code: either those between two levels or, if only zeros draw, the
    zeros."""
    grad = torch.cat([torch.tensor([1.0, 0.0]), torch.full((248,), 0.3), torch.zeros(250)])
    decoded = decode_one(compressor, encode(HOST, compressor, grad)[0], 500)
    assert max(decoded[2:250].unique().numel(), decoded[250:].unique().numel()) > 1


@parametrize(lambda compressor: compressor.traits.unbiased)
def test_unbiased_compressors_need_no_feedback(compressor):
    assert not compressor.traits.needs_feedback
