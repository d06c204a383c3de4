"""Comparison of the kernels of PowerSGD's stages with their specification in fp64, and with their own repetition."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch

from gckernels.codec import Work
from gckernels.ops.powersgd import kernels, reference
from gckernels.toolkit.kernels.launch import Launch, record_launches

METHODS = {"PowerSGD(rank=4)": 4, "PowerSGD(rank=32)": 32}
"""Ranks by name: few columns are multiplied without tensor cores."""

STAGES = ("left", "right", "bases", "first bases", "keep", "reconstruct")
SCALE = 0.25
SEEDS = (12345, 678)
U = 2.0**-24  # the largest relative error of one rounding in fp32

Given = dict[str, list[torch.Tensor]]
"""Gradients, residuals and factors of the matrices of one launch, on the CPU."""


def _given(rank: int, numel: int, dtype: torch.dtype, normal: Callable[[int], torch.Tensor]) -> Given:
    """Two matrices: one of about ``numel`` elements, and one a little larger and on its side."""
    rows = max(rank, math.isqrt(numel))
    shapes = ((rows, max(rank, numel // rows)), (max(rank, numel // rows) + 13, rows))
    given: Given = {
        "grads": [normal(rows * cols).to(dtype) for rows, cols in shapes],
        "residuals": [normal(rows * cols) for rows, cols in shapes],
    }
    for name, side in (("left", 0), ("right", 1), ("factors", 1)):
        given[name] = [normal(rank * shape[side]).view(rank, -1) for shape in shapes]
    return given


def _bound(stage: str, given: Given) -> Work:
    grads, residuals, left, right, factors = given.values()
    match stage:
        case "left":
            return kernels.bind_left(grads, residuals, right, left, SCALE)
        case "right":
            return kernels.bind_right(grads, residuals, left, right, SCALE)
        case "bases":
            return kernels.bind_orthogonalise(left, None)
        case "first bases":
            return kernels.bind_orthogonalise(left, SEEDS, torch.ones(1, dtype=torch.int64, device=left[0].device))
        case "keep":
            return kernels.bind_keep(right, factors)
        case _:
            return kernels.bind_reconstruct(left, right, grads, residuals)


def launches(rank: int, numel: int, dtype: torch.dtype) -> list[Launch]:
    """The launches of all stages."""
    works = [_bound(stage, _given(rank, numel, dtype, torch.empty)) for stage in STAGES]
    with record_launches() as recorded:
        for work in works:
            work()
    return recorded


def compare(
    rank: int, numel: int, dtype: torch.dtype, device: torch.device, random: torch.Generator
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every stage's name, with a function that raises unless its kernels are right, twice with the same bits."""
    given = _given(rank, numel, dtype, lambda count: torch.randn(count, generator=random))
    for stage in STAGES:
        yield stage, functools.partial(_check, stage, given, device)


def _check(stage: str, given: Given, device: torch.device) -> None:
    on_device = {name: [each.to(device, copy=True) for each in tensors] for name, tensors in given.items()}
    work = _bound(stage, on_device)
    results = []
    for _ in range(2):
        for name, tensors in given.items():
            for mine, values in zip(on_device[name], tensors, strict=True):
                mine.copy_(values)
        work()
        results.append({name: [each.to("cpu", copy=True) for each in tensors] for name, tensors in on_device.items()})
    first, second = results
    for name in given:
        assert all(map(torch.equal, first[name], second[name])), f"{name} differ when {stage} is repeated"
    for index in range(len(given["grads"])):
        _compare(stage, *({name: each[index] for name, each in lists.items()} for lists in (given, first)))


def _compare(stage: str, given: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Assert that the results of a stage for one matrix are those of the specification."""
    left, right = given["left"].double(), given["right"].double()
    values = reference.matrix(given["grads"], given["residuals"], left.shape[1])
    exact, magnitudes = values.double(), values.double().abs()
    match stage:
        case "left":
            bound = (right.shape[1] + 1) * U * reference.left_of(magnitudes, right.abs(), SCALE)
            _assert_within(got["left"], reference.left_of(exact, right, SCALE), bound)
        case "right":
            bound = (left.shape[1] + 1) * U * reference.right_of(magnitudes, left.abs(), SCALE)
            _assert_within(got["right"], reference.right_of(exact, left, SCALE), bound)
        case "bases" | "first bases":  # random columns are independent, with and without a seed
            want = reference.orthogonalise(given["left"], None)
            torch.testing.assert_close(got["left"], want, rtol=2.0**-22, atol=2.0**-30)
        case "keep":
            assert torch.equal(got["factors"], given["right"]) and torch.equal(got["right"], given["right"])
        case _:
            dtype = given["grads"].dtype
            want, bound = (left.T @ right).view(-1), ((len(left) + 1) * U * (left.abs().T @ right.abs())).view(-1)
            if dtype != torch.float32:
                bound = bound + torch.finfo(dtype).eps / 2 * (want.abs() + bound)
            _assert_within(got["grads"], want, bound + torch.finfo(dtype).tiny)
            left_over = values.view(-1) - got["grads"].float()
            assert torch.equal(got["residuals"], left_over), "the residual is not the error of the rounded product"


def _assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    excess = float(((got.double() - want).abs() - bound).max())
    assert excess <= 0, f"a product differs from fp64 by {excess} more than rounding explains"
