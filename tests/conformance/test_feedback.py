"""Error feedback loses nothing, and keeps values that are not finite out of the residual."""

from __future__ import annotations

import pytest
import torch
from configurations import INTERPRETED_IN_KINDS, QUICK, SHOWN_ELSEWHERE, parametrize

from cases import cases
from gckernels import SigNUM
from helpers import (
    GRADIENTS,
    HOST_PARAM,
    INTERPRETED_SLOWLY,
    KERNEL,
    KERNEL_PARAM,
    NON_FINITE,
    assert_equal,
    decode_one,
    encode,
    random_residual,
    zero_residual,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
ROUNDING = 2.0**-24  # relative error of one fp32 operation


@INTERPRETED_IN_KINDS
# One kind of gradient is enough for the kernel, which is slow in the interpreter. test_equivalence.py tests its
# residual to the last bit for all gradients.
@IMPLEMENTATIONS
@parametrize(lambda compressor: compressor.traits.conserves, quick=QUICK)
@cases("name", ["heavy_tails", "random", "ties", "all_equal", "denormals"])
def test_nothing_is_lost(compressor, implementation, name):
    """Over several steps, the sum of the decoded values plus the residual equals the sum of the gradients."""
    if implementation is KERNEL and name != "heavy_tails":
        return
    numel = 333
    residual = torch.zeros(numel)
    difference, bound = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(4):
        grad = GRADIENTS[name](numel)
        values = grad + residual
        payload, residual = encode(implementation, compressor, grad, residual, chunks=2, seed=step)
        decoded = decode_one(compressor, payload, numel)
        difference += grad.double() - decoded.double()
        # each step rounds twice: the gradient plus the residual, and that sum minus the decoded values
        bound += ROUNDING * (values.abs().double() + residual.abs().double())
    assert ((difference - residual.double()).abs() <= bound).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("beta", [0.5, *(pytest.param(beta, marks=INTERPRETED_SLOWLY) for beta in (0.0, 0.9))])
def test_signum_remembers_the_momentum(implementation, beta):
    """The state is the exact momentum in every step, and the decoded values are its signs."""
    compressor, numel = SigNUM(beta=beta), 333
    state, momentum = torch.zeros(numel), torch.zeros(numel)
    for step in range(4):
        grad = torch.randn(numel)
        momentum = momentum * beta + grad * (1 - beta)
        payload, state = encode(implementation, compressor, grad, state, chunks=2, seed=step)
        assert_equal(state, momentum, "momentum")
        assert_equal(decode_one(compressor, payload, numel), momentum.sign())


@IMPLEMENTATIONS
@parametrize()
@cases("name", [*NON_FINITE, pytest.param("overflow", marks=INTERPRETED_IN_KINDS)])
def test_inf_and_nan_show_but_do_not_stay(compressor, implementation, name):
    """Decoding shows that a value was not finite; the residual keeps its old, finite value there."""
    numel, where = 300, 150
    residual = random_residual(compressor, numel)
    if name == "overflow":
        grad = torch.randn(numel)
        grad[where] = residual[where::numel] = 3e38
    else:
        grad = NON_FINITE[name](numel)
        assert not torch.isfinite(grad[where])
    payload, kept = encode(implementation, compressor, grad, residual)
    shown = ~torch.isfinite(decode_one(compressor, payload, numel))
    if name != "overflow" or compressor.traits.conserves:  # a weighted sum of the two need not overflow
        assert shown.any() if compressor.name in SHOWN_ELSEWHERE else shown[where]
    assert torch.isfinite(kept).all()
    for state, old in zip(kept.split(numel), residual.split(numel), strict=True):
        assert_equal(state[shown], old[shown], "residual where nothing finite was sent")


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
def test_feedback_recovers_after_a_bad_step(compressor, implementation):
    """The step after an inf continues from the residual before it."""
    numel = 100
    good, bad = torch.randn(numel), torch.full((numel,), torch.inf)
    _, before = encode(implementation, compressor, good, zero_residual(compressor, numel))
    _, after = encode(implementation, compressor, bad, before)
    assert_equal(after, before, "residual")
    payload, _ = encode(implementation, compressor, good, after, seed=1)
    assert torch.isfinite(decode_one(compressor, payload, numel)).all()
