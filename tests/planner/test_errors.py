"""Errors of compressors on gradients that say nothing of them."""

from __future__ import annotations

import pytest
import torch

from gckernels import BlockQuant, Cast16, EFSignSGD, PowerSGD
from gckernels.sync.accuracy.errors import relative_error

METHODS = (Cast16(), BlockQuant(bits=4), EFSignSGD(), PowerSGD(rank=2))
ZERO, GRADIENT = torch.zeros(512), torch.randn(512, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_zeros_have_no_error_that_would_allow_a_compressor(method):
    """A layer may have zero gradients in its first steps, as one that is multiplied by zeros."""
    assert relative_error(method, [ZERO] * 4, (16, 32)) is None


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_zeros_among_gradients_do_not_count(method):
    once, among = (relative_error(method, given, (16, 32)) for given in ([GRADIENT] * 2, [ZERO, ZERO, GRADIENT, ZERO]))
    assert once and among and among > once / 2


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_gradients_of_a_dtype_that_is_sent_exactly_have_none(method):
    """A model may have a parameter of 64 bits among others."""
    assert relative_error(method, [GRADIENT.double()] * 2, (16, 32)) is None


def test_without_elements_nothing_is_lost():
    assert relative_error(BlockQuant(), [torch.zeros(0)] * 2, (0, 4)) == 0.0
