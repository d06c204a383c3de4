"""When decoding payloads that no encoder wrote, nothing outside ``out`` is written, and damage shows as NaN."""

from __future__ import annotations

import pytest
import torch
from configurations import INTERPRETED_IN_KINDS, QUICK, assert_payloads_equal, parametrize

from cases import cases
from gckernels import chunk_numel
from gckernels.toolkit.payload import STATUS_OK
from helpers import HOST_PARAM, KERNEL_PARAM, REFERENCE, assert_equal, decode, encode

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])


def has_status(compressor) -> bool:
    return not compressor.traits.summable


@IMPLEMENTATIONS
@parametrize()
@cases(
    ("status", "numel", "chunks", "dtype"),
    [
        pytest.param("good", 1, 1, torch.float32, marks=INTERPRETED_IN_KINDS),
        ("good", 1000, 1, torch.float32),
        pytest.param("good", 333, 3, torch.bfloat16, marks=INTERPRETED_IN_KINDS),
        pytest.param("random", 1000, 1, torch.bfloat16, marks=INTERPRETED_IN_KINDS),
        pytest.param("random", 333, 3, torch.float32, marks=INTERPRETED_IN_KINDS),
    ],
)
def test_random_bytes_write_nothing_out_of_bounds(compressor, implementation, status, numel, chunks, dtype):
    """The helper ``decode`` checks the memory on either side of ``out``."""
    shape = 2, chunks, compressor.payload_nbytes(chunk_numel(numel, chunks))
    payloads = torch.randint(0, 256, shape, dtype=torch.uint8)
    if status == "good" and has_status(compressor):
        payloads[..., :4].view(torch.int32)[:] = STATUS_OK
    got = decode(implementation, compressor, payloads, torch.empty(numel, dtype=dtype))
    assert_equal(got, decode(REFERENCE, compressor, payloads, torch.empty(numel, dtype=dtype)))


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
def test_encoding_leaves_what_is_between_the_rows(compressor, implementation):
    """Rows of payloads may lie apart, and the memory between them stays as it is."""
    numel, chunks, gap = 20, 3, 4096
    size = chunk_numel(numel, chunks)
    nbytes = compressor.payload_nbytes(size)
    rows = torch.full((chunks, nbytes + gap), 0xAA, dtype=torch.uint8, device=implementation.device)
    grad = torch.randn(numel)
    implementation.encode(compressor, grad.to(implementation.device), None, rows[:, :nbytes], size)
    assert (rows[:, nbytes:] == 0xAA).all()
    want, _ = encode(REFERENCE, compressor, grad, None, chunks)
    assert_payloads_equal(compressor, size, rows[:, :nbytes].cpu(), want, grad)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(has_status, quick=QUICK)
def test_wrong_status_word_decodes_to_nan(compressor, implementation):
    """One damaged payload among the sources spoils its chunk, and no other."""
    numel = 100
    payloads = torch.stack([encode(REFERENCE, compressor, torch.randn(numel), None, chunks=2)[0] for _ in range(3)])
    payloads[1, 1, 2] ^= 1
    decoded = decode(implementation, compressor, payloads, torch.empty(numel))
    size = chunk_numel(numel, 2)
    assert torch.isfinite(decoded[:size]).all()
    assert decoded[size:].isnan().all()


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(has_status, quick=QUICK)
def test_zeroed_payload_decodes_to_nan(compressor, implementation):
    """A lost message leaves a payload of zeros."""
    payload = torch.zeros(1, compressor.payload_nbytes(30), dtype=torch.uint8)
    assert decode(implementation, compressor, payload, torch.empty(30)).isnan().all()
