"""Payloads have the stated number of bytes, and are read and written wherever their rows lie."""

from __future__ import annotations

import pytest
import torch
from configurations import INTERPRETED_IN_KINDS, OURS, QUICK, assert_payloads_equal, for_each, parametrize
from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from gckernels import CODECS, chunk_numel
from gckernels.testing.documented import size_formula, stated_nbytes
from helpers import (
    HOST_PARAM,
    KERNEL_PARAM,
    POISON_BYTE,
    REFERENCE,
    SIZES,
    assert_equal,
    decode,
    decode_one,
    encode,
    lazily_committed,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_compressor_states_its_size(name):
    assert size_formula(CODECS[name]), f"add a line 'Size in bytes: ``...``' to the docstring of {name}'s module"


@parametrize()
@given(numel=st.integers(0, 2**40))
def test_payload_has_the_stated_size(compressor, numel):
    nbytes = compressor.payload_nbytes(numel)
    if compressor.name in OURS:
        assert nbytes == stated_nbytes(compressor, numel)
    assert nbytes % 16 == 0
    assert nbytes >= 16


@for_each()
@cases("numel", SIZES)
def test_reference_writes_the_stated_size(compressor, numel):
    payload = compressor.encode_reference(torch.randn(numel), numel, 0, 0)
    assert payload.dtype == torch.uint8
    assert payload.shape == (compressor.payload_nbytes(numel),)
    assert compressor.decode_reference(payload, numel).shape == (numel,)


# the first overflows 32 bits in the product of row number and stride, the second in the stride itself
@cases(("rows", "stride"), [(3, 3 * 2**29), (2, 2**31 + 16)])
@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
def test_rows_further_apart_than_32_bits_reach(compressor, implementation, rows, stride):
    """Payloads that 32-bit indexing cannot reach are encoded and decoded; only the bytes of the rows are touched."""
    numel = 40 * rows
    size = chunk_numel(numel, rows)
    nbytes = compressor.payload_nbytes(size)
    buffer = lazily_committed((rows - 1) * stride + nbytes + 16, implementation.device)
    payload = buffer.as_strided((rows, nbytes), (stride, 1))
    buffer[nbytes : nbytes + 16] = POISON_BYTE
    grad = torch.randn(numel)
    implementation.encode(compressor, grad.to(implementation.device), None, payload, size)
    want, _ = encode(REFERENCE, compressor, grad, None, rows)
    assert_payloads_equal(compressor, size, payload.cpu(), want, grad)
    assert (buffer[nbytes : nbytes + 16] == POISON_BYTE).all()
    assert not buffer[-16:].any()

    # first the rows are chunks, then sources
    out = torch.empty(numel, device=implementation.device)
    implementation.decode(compressor, payload[None], out, size)
    assert_equal(out.cpu(), decode_one(compressor, payload.cpu(), numel))
    implementation.decode(compressor, payload[:, None], out[:size], size)
    assert_equal(out[:size].cpu(), decode(REFERENCE, compressor, payload.cpu()[:, None], torch.empty(size)))
