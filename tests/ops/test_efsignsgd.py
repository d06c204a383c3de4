"""Signs with the mean magnitude, and with a magnitude that keeps the length of a block in its own direction."""

from __future__ import annotations

import pytest
import torch

import gckernels
from gckernels import EFSignSGD


def values(scale: float) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("block", [128, 1024, None])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_projection_keeps_the_length_of_every_block(block, scale):
    compressor, given = EFSignSGD(block=block, magnitude="projection"), values(scale)
    decoded = gckernels.decode(compressor, gckernels.encode(compressor, given), 3000)
    for one, two in zip(given.double().split(block or 3000), decoded.double().split(block or 3000), strict=True):
        assert (one @ two / (one @ one)).item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_blocks_whose_squares_leave_the_range_have_the_mean_magnitude(scale):
    found = [
        gckernels.decode(compressor, gckernels.encode(compressor, values(scale)), 3000)
        for compressor in (EFSignSGD(), EFSignSGD(magnitude="projection"))
    ]
    assert torch.equal(*found) and bool(found[0].isfinite().all())


def test_an_empty_block_stays_zero():
    compressor = EFSignSGD(magnitude="projection")
    assert not gckernels.decode(compressor, gckernels.encode(compressor, torch.zeros(300)), 300).any()


def test_other_magnitudes_are_refused():
    with pytest.raises(ValueError, match="EFSignSGD: magnitude must be one of mean, projection, got 'rms'"):
        EFSignSGD(magnitude="rms")
