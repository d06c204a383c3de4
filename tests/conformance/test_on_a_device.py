"""Interpreted kernels in the memory of the simulated device: arguments, tables and temporaries are on the device, and
behind the streams that filled them."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from units import decodings, encodings, recodings

import gckernels
from gckernels.codec import Codec
from gckernels.ops.powersgd import kernels
from harness.simulated_device import build
from helpers import HAS_GPU, assert_equal, number
from low_rank_stages import Stages
from ranks import Device, ranks_on, run_ranks, values_of

pytestmark = [
    pytest.mark.skipif(build.reason_against() is not None, reason=str(build.reason_against())),
    pytest.mark.skipif(HAS_GPU, reason="where there is a GPU, kernels are not interpreted"),
]

ADDED = 7
SIZES = (17, 0, 260, 90)
KINDS = ["BlockQuant(bits=4)", "Cast16", "ChunkTopK", "EFSignSGD", "QSGD", "RandomK", "SignSGD", "TopK"]


def tensors_of(unit: Any) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(unit, field.name) for field in dataclasses.fields(unit)}
    return {name: value for name, value in fields.items() if torch.is_tensor(value)}


def on_the_device(unit: Any) -> Any:
    return dataclasses.replace(unit, **{name: each.to("sim") for name, each in tensors_of(unit).items()})


def bound(compressor: Codec) -> None:
    """Bound batches, twice on another stream."""
    with torch.device("cpu"):
        cases = [
            ("bind_encodes", encodings(compressor, "cpu", 2, sizes=SIZES), (1.0,), True),
            ("bind_decodes", decodings(compressor, "cpu", 2, 3, SIZES), (0.5, True), False),
            ("bind_recodes", recodings(compressor, "cpu", SIZES), (0.5,), True),
        ]
    stream = torch.get_device_module("sim").Stream()
    for bind, expected, given, has_seed in cases:
        units, bind_to = [on_the_device(each) for each in expected], getattr(compressor.triton, bind)
        there, here = (
            bind_to(each, *given, *([number(ADDED, device)] if has_seed else []))
            for each, device in ((units, "sim"), (expected, "cpu"))
        )
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            there()
            there()
        torch.accelerator.current_stream().wait_stream(stream)
        here()
        here()
        for unit, other in zip(units, expected, strict=True):
            for name, wanted in tensors_of(other).items():
                assert_equal(getattr(unit, name).cpu(), wanted, name)


def eager(compressor: Codec) -> None:
    """The ops of users, which ask the tensors' device for its kernels."""
    grad = torch.randn(1000, device="cpu")
    results = []
    for device in ("sim", "cpu"):
        own, residual = grad.to(device), torch.zeros(compressor.traits.states * 1000, device=device)
        payload = torch.zeros(compressor.payload_nbytes(1000), dtype=torch.uint8, device=device)
        out = torch.zeros(1000, device=device)
        compressor.encode(own, residual, payload, seed=ADDED)
        compressor.decode(payload, out)
        results.append([each.cpu() for each in (residual, payload, out)])
    for found, wanted in zip(*results, strict=True):
        assert_equal(found, wanted, "a tensor")


def interpreted(function: Any, spec: str) -> None:
    """Call a function that compares the kernels of a compressor on the device and on the CPU."""
    with mock.patch.object(Codec, "backend", classmethod(lambda cls, device: cls.triton)):
        function(gckernels.from_spec(spec))


QUICK = ("BlockQuant(bits=4)", "Cast16", "EFSignSGD")


@pytest.mark.parametrize(
    "spec", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in KINDS]
)
@pytest.mark.parametrize("function", [eager, bound])
def test_codecs(function, spec):
    with ranks_on(Device("sim")):
        values_of(run_ranks(1, interpreted, function, spec))


def steps_of_powersgd(device: str) -> list[torch.Tensor]:
    """The steps for three matrices, of which one has rows that do not let threads load 16 bytes."""
    torch.manual_seed(0)
    shapes = [(24, 16), (33, 7), (64, 40)]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cpu").to(device)

    gradients, residuals = ([drawn(rows * cols) for rows, cols in shapes] for _ in range(2))
    left, right = ([drawn(4, shape[side]) for shape in shapes] for side in range(2))
    stages = Stages(kernels)
    stages.orthogonalise(right, [1, 2, 3], ADDED)
    stages.left(gradients, residuals, right, left, 0.5)
    stages.orthogonalise(left, None)
    stages.right(gradients, residuals, left, right, 0.5)
    stages.reconstruct(left, right, gradients, residuals)
    return [each.cpu() for each in (*gradients, *residuals, *left, *right)]


def low_rank() -> None:
    for found, wanted in zip(steps_of_powersgd("sim"), steps_of_powersgd("cpu"), strict=True):
        assert_equal(found, wanted, "a tensor")


def test_powersgd():
    with ranks_on(Device("sim")):
        values_of(run_ranks(1, low_rank))
