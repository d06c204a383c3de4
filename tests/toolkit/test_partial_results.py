"""Statistics of whole units whose partial results are combined by a launch of its own."""

from __future__ import annotations

import pytest
import torch

from gckernels import TBQ, EFSignSGD, LinearQuant, Natural, OneBit
from gckernels.codec import Encoding
from gckernels.testing.agreement import assert_payloads_equal
from gckernels.toolkit.kernels.launch import record_launches
from gckernels.toolkit.quantizer import launches as shapes
from helpers import KERNEL, KERNEL_PARAM, encode, interpreted

COMPRESSORS = [EFSignSGD(block=None), OneBit(block=None), LinearQuant()]
SIZES = (5 * shapes.TILE - 7, 4 * shapes.TILE)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Programs that encode reduce two partial results at most."""
    monkeypatch.setattr(shapes, "PARTIALS", 2)


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda compressor: compressor.name)
@interpreted(COMPRESSORS)
def test_payloads_are_those_of_the_reference_and_of_batches(implementation, compressor):
    units, want = [], []
    for numel in SIZES:
        grad, residual = torch.randn(numel), torch.randn(numel)
        payload, kept = encode(implementation, compressor, grad, residual, seed=7)
        values = grad + residual
        reference = compressor.encode_reference(values, numel, 7, 0)[None]
        assert_payloads_equal(compressor, numel, payload, reference, values)
        want += [payload, kept]
        moved = [tensor.to(implementation.device) for tensor in (grad, residual, torch.zeros_like(payload))]
        units.append(Encoding(compressor, *moved, seed=7, size=numel))
    implementation.backend(compressor).bind_encodes(units)()
    got = [tensor.cpu() for unit in units for tensor in (unit.payload, unit.residual)]
    assert all(map(torch.equal, got, want))


def test_one_more_launch_combines_them():
    compressor = EFSignSGD(block=None)

    def launches(numel: int) -> list[str]:
        payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
        with record_launches() as recorded:
            KERNEL.backend(compressor).encode(Encoding(compressor, torch.empty(numel), None, payload, 0, numel))
        return [launch.name for launch in recorded]

    assert launches(2 * shapes.TILE) == ["_partials_kernel", "_encode_kernel"]
    assert launches(3 * shapes.TILE) == ["_partials_kernel", "_combine_kernel", "_encode_kernel"]


def test_without_a_statistic_there_is_nothing_to_combine():
    for compressor in (Natural(), TBQ(), EFSignSGD()):
        numel = 3 * shapes.TILE
        payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
        with record_launches() as recorded:
            KERNEL.backend(compressor).bind_encodes(
                [Encoding(compressor, torch.zeros(numel), None, payload, 0, numel)]
            )()
        assert [launch.name for launch in recorded] == ["_encode_batch_kernel"]
