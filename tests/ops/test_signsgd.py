"""The majority vote draws random numbers for zeros alone, and where it draws none its bytes are the same."""

from __future__ import annotations

import pytest
import torch

from gckernels import SignSGD
from gckernels.toolkit.quantizer.launches import TILE
from helpers import HOST_PARAM, KERNEL_PARAM, REFERENCE, assert_equal, encode


@pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
@pytest.mark.parametrize("zeros", ["none", "in one tile", "in all tiles", "behind the last element alone"])
def test_zeros(implementation, zeros):
    numel = 3 * TILE + (1000 if zeros == "behind the last element alone" else 0)
    grad = torch.randn(numel)
    grad[grad == 0] = 1.0
    if zeros == "in one tile":
        grad[TILE : TILE + 100 : 3] = 0.0
        grad[TILE + 1] = -0.0
    elif zeros == "in all tiles":
        grad[::7] = 0.0
    got, _ = encode(implementation, SignSGD(), grad, None, seed=5)
    want, _ = encode(REFERENCE, SignSGD(), grad, None, seed=5)
    assert_equal(got, want, "payload")
