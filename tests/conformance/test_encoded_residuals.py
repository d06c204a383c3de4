"""Encoding with residuals in 8 bits is encoding with their values in fp32, and rounding the new ones to 8 bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from configurations import INTERPRETED_IN_KINDS, QUICK, parametrize
from hypothesis import given
from hypothesis import strategies as st
from units import assert_same, copied, encodings, recodings

import gckernels
from cases import cases
from gckernels import CODECS, SigNUM, TopK, chunk_numel, decode_residual, encode_residual, residual_nbytes
from gckernels.codec import SEED_MASK
from gckernels.ops import BlockQuant
from gckernels.toolkit.residuals import multiply_residual
from helpers import GRADIENTS, HOST, HOST_PARAM, KERNEL_PARAM, NON_FINITE, assert_equal, encode, recode

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])


def _takes_them(compressor) -> bool:
    return compressor.encodes_residuals


@given(st.integers(0, 1200), st.integers(1, 4), st.sampled_from([*GRADIENTS]), st.sampled_from([0, 16, 256]))
def test_format(numel, chunks, name, more):
    """Codes are at most half a step from the values, a step at most a 64th of the largest of a group. A residual that
    is decoded and encoded again is the same."""
    size = chunk_numel(numel, chunks) + more
    values = GRADIENTS[name](numel) / 4
    encoded = encode_residual(values, chunks, size)
    assert encoded.shape == (chunks, residual_nbytes(size))
    decoded = decode_residual(encoded, numel, size)
    for start in range(0, numel, max(size, 1)):
        stop = min(start + size, numel)
        for group, got in zip(values[start:stop].split(256), decoded[start:stop].split(256), strict=True):
            step = max(group.abs().max() / 63.5, 2.0**-126)
            assert ((group - got).abs() <= step / 2).all()
    assert_equal(encode_residual(decoded, chunks, size), encoded, "the residual that is encoded again")


def test_format_takes_little_more_than_a_byte_per_element():
    assert residual_nbytes(2**20) / 2**20 < 1.005
    assert residual_nbytes(0) == 0
    assert (decode_residual(torch.zeros(2, residual_nbytes(304), dtype=torch.uint8), 600) == 0).all()


def test_multiplication_by_powers_of_two_is_exact():
    size = chunk_numel(1000, 3)
    encoded = encode_residual(torch.randn(1000), 3, size)
    before = decode_residual(encoded, 1000)
    for factor in (2.0, 65536.0, 0.25, 2.0**-16):
        multiply_residual(encoded, size, torch.tensor(factor))
        before = before * factor
        assert_equal(decode_residual(encoded, 1000), before, f"times {factor}")
    multiply_residual(encoded, size, torch.tensor(3.0))
    assert torch.allclose(decode_residual(encoded, 1000), before * 3, atol=float(before.abs().max()) / 25)
    for _ in range(3):
        multiply_residual(encoded, size, torch.tensor(2.0**-100))
    assert (decode_residual(encoded, 1000) == 0).all()


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(_takes_them, quick=QUICK)
@cases("unit", [(1500, 1, torch.float32), (4200, 3, torch.bfloat16), (17, 2, torch.float32)])
def test_encoding(compressor, implementation, unit):
    """The payload is made with the decoded residual in fp32, and the new residual the rounded one of fp32."""
    numel, chunks, dtype = unit
    size, grad = chunk_numel(numel, chunks) + 16, torch.randn(numel).to(dtype)
    old = encode_residual(torch.randn(numel) / 8, chunks, size)
    payload, new = encode(implementation, compressor, grad, old, chunks, 5, size=size)
    decoded = decode_residual(old, numel, size)
    wanted, left = encode(implementation, compressor, grad, decoded, chunks, 5, size=size)
    assert_equal(payload, wanted, "payload")
    assert_equal(new, encode_residual(left, chunks, size), "residual")


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(_takes_them, quick=QUICK)
def test_recoding(compressor, implementation):
    numel, size = 1500, 1504
    payloads = torch.cat([encode(HOST, compressor, torch.randn(numel), None, 1, each, size=size)[0] for each in (1, 2)])
    old = encode_residual(torch.randn(numel) / 8, 1, size)
    payload, new = recode(implementation, compressor, payloads, old[0], numel, 0.5, 3, size)
    wanted, left = recode(implementation, compressor, payloads, decode_residual(old, numel, size), numel, 0.5, 3, size)
    assert_equal(payload, wanted, "payload")
    assert_equal(new, encode_residual(left, 1, size)[0], "residual")


@IMPLEMENTATIONS
@cases("block", [32, 256, 16384])
@cases("name", [*NON_FINITE])
def test_values_that_are_not_finite_do_not_stay(implementation, block, name):
    """The residual of a block that is not finite keeps its values."""
    old = encode_residual(torch.randn(20000))
    grad = NON_FINITE[name](20000)
    _, new = encode(implementation, BlockQuant(4, block), grad, old)
    _, left = encode(implementation, BlockQuant(4, block), grad, decode_residual(old, 20000))
    assert_equal(new, encode_residual(left), "residual")


def _in_8_bits(units):
    """Copies of units, of which every other one that has a residual has it in 8 bits."""
    found = copied(units)
    for unit in found[::2]:
        if unit.residual is not None:
            chunks = unit.payload.shape[0] if unit.payload.dim() == 2 else 1
            unit.residual = encode_residual(unit.residual.cpu(), chunks, unit.size).to(unit.residual.device)
    return found


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(_takes_them, quick=QUICK)
def test_units_that_are_bound_together(compressor, implementation):
    """Units with residuals of both forms give the same bits together as one by one."""
    backend, device = implementation.backend(compressor), implementation.device
    bound = _in_8_bits(encodings(compressor, device, 2))
    alone = copied(bound)
    backend.bind_encodes(bound)()
    for unit in alone:
        backend.encode(dataclasses.replace(unit, seed=unit.seed & SEED_MASK))
    assert_same(bound, alone)
    merged = _in_8_bits(recodings(compressor, device))
    single = copied(merged)
    backend.bind_recodes(merged, 0.5)()
    for unit in single:
        backend.recode(unit, 0.5)
    assert_same(merged, single)


def test_who_takes_them():
    """Element-wise quantisers whose residuals are errors; all others say that they need fp32."""
    takes = {name for name, cls in CODECS.items() if cls().encodes_residuals}
    assert {"BlockQuant", "EFSignSGD", "OneBit", "LinearQuant"} <= takes
    assert not {"SigNUM", "TopK", "ChunkTopK", "RandomK", "DGC", "Cast16"} & takes
    for compressor in (SigNUM(), TopK()):
        with pytest.raises(TypeError, match=r"residual must be torch\.float32 for this compressor, got torch.uint8"):
            gckernels.encode(compressor, torch.ones(64), encode_residual(torch.ones(64)))


def test_arguments():
    grad, compressor = torch.ones(600), BlockQuant(4)
    for residual, error in (
        (encode_residual(torch.ones(600), 2), r"must have the shape \(1, 624\) for 1 payload\(s\) of 600 elements"),
        (torch.zeros(2, 624, dtype=torch.uint8).T[:624, :1], "must have the shape"),
        (torch.zeros(640, dtype=torch.uint8)[1:625], "16-byte aligned"),
    ):
        with pytest.raises(ValueError, match=error):
            gckernels.encode(compressor, grad, residual)
    residual = encode_residual(torch.zeros(600))
    payload = gckernels.encode(compressor, torch.randn(600), residual)
    again = residual.clone()
    compressor.recode(payload[None], again[0], torch.empty_like(payload), 600)
    assert not torch.equal(residual, again)
