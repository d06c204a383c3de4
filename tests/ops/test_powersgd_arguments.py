"""The ops of PowerSGD refuse missing tensors and unequal numbers of tensors, by name, and change nothing."""

from __future__ import annotations

import pytest
import torch

from gckernels.ops.powersgd import ops as powersgd_ops

FUNCTIONS = {
    stage: (getattr(powersgd_ops, stage), getattr(torch.ops.gckernels, f"powersgd_{stage}"))
    for stage in ("orthogonalise", "left", "right", "reconstruct", "keep")
}
ORDERS = {
    "left": ("grads", "residuals", "right", "left"),
    "right": ("grads", "residuals", "left", "right"),
    "reconstruct": ("left", "right", "grads", "residuals"),
}


def _matrices(**counts):
    """The tensors of matrices of 3 rows, 4 columns and rank 2: ``counts`` of each kind, by default one."""
    lengths = {"grads": (12,), "residuals": (12,), "left": (2, 3), "right": (2, 4)}
    return {name: [torch.randn(shape) for _ in range(counts.get(name, 1))] for name, shape in lengths.items()}


def _refuses(stage, arguments, message):
    before = [[tensor.clone() for tensor in each] for each in arguments if isinstance(each, list)]
    for function in FUNCTIONS[stage]:
        with pytest.raises(ValueError) as error:
            function(*arguments)
        assert str(error.value) == f"powersgd_{stage}: there must be {message}"
    after = [each for each in arguments if isinstance(each, list)]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"grads": 0, "residuals": 0, "left": 0, "right": 0}, "at least one of each, got 0 grads, 0 left, 0 right"),
        ({"grads": 0, "left": 0, "right": 0}, "as many of each, got 0 grads, 0 left, 0 right, 1 residuals"),
        ({"grads": 0, "residuals": 0}, "as many of each, got 0 grads, 1 left, 1 right"),
        ({"grads": 2}, "as many of each, got 2 grads, 1 left, 1 right, 1 residuals"),
        ({"residuals": 2}, "as many of each, got 1 grads, 1 left, 1 right, 2 residuals"),
        ({"left": 0}, "as many of each, got 1 grads, 0 left, 1 right, 1 residuals"),
        ({"right": 2, "residuals": 0}, "as many of each, got 1 grads, 1 left, 2 right"),
    ],
)
@pytest.mark.parametrize("stage", list(ORDERS))
def test_matrices(stage, counts, message):
    given = _matrices(**counts)
    _refuses(stage, [given[name] for name in ORDERS[stage]], f"{message}; only residuals may be empty")


@pytest.mark.parametrize(
    ("count", "seeds", "message"),
    [
        (0, None, "at least one of each, got 0 factors"),
        (0, (), "at least one of each, got 0 factors, 0 seeds"),
        (0, (1,), "as many of each, got 0 factors, 1 seeds"),
        (1, (), "as many of each, got 1 factors, 0 seeds"),
        (2, (1,), "as many of each, got 2 factors, 1 seeds"),
    ],
)
def test_factors(count, seeds, message):
    _refuses("orthogonalise", (_matrices(left=count)["left"], seeds), message)


@pytest.mark.parametrize(
    ("means", "factors", "message"),
    [
        (0, 0, "at least one of each, got 0 means"),
        (0, 1, "as many of each, got 0 means, 1 factors"),
        (2, 1, "as many of each, got 2 means, 1 factors"),
    ],
)
def test_means(means, factors, message):
    given = _matrices(left=means)["left"], _matrices(left=factors)["left"]
    _refuses("keep", given, f"{message}; only factors may be empty")


def test_what_may_be_empty():
    given = _matrices(residuals=0)
    for stage, order in ORDERS.items():
        for function in FUNCTIONS[stage]:
            function(*(given[name] for name in order))
    for function in FUNCTIONS["keep"]:
        function(given["left"], [])
