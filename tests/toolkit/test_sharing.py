"""Units that are bound together share launches, as far as their kernels and their temporaries allow."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gckernels import DGC, TopK
from gckernels.codec import Decoding, Encoding, Recoding
from gckernels.toolkit.kernels import sharing
from gckernels.toolkit.kernels.launch import record_launches, temporary
from gckernels.toolkit.sparsifier import encode_kernels
from gckernels.toolkit.sparsifier.encode_kernels import SMALL
from gckernels.toolkit.sparsifier.keys import MIN_SAMPLE
from helpers import HOST, KERNEL_PARAM, assert_equal, decode, encode, number

LARGE = (SMALL + 16, 9008, 100_000)


def encodings(compressor, sizes: tuple[int, ...]) -> list[Encoding]:
    return [
        Encoding(
            compressor,
            torch.empty(numel),
            torch.empty(compressor.traits.states * numel),
            torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8),
            seed,
            numel,
        )
        for seed, numel in enumerate(sizes)
    ]


def count(work) -> int:
    with record_launches() as recorded:
        work()
    return len(recorded)


def encode_launches(compressor, *sizes: int) -> int:
    return count(compressor.triton.bind_encodes(encodings(compressor, sizes)))


@pytest.mark.parametrize("compressor", [TopK(), DGC(clip=1.0)], ids=lambda compressor: compressor.name)
def test_large_units_take_as_many_launches_as_one(compressor):
    assert encode_launches(compressor, *LARGE) == encode_launches(compressor, LARGE[0]) > 2


def test_units_share_with_those_of_the_same_kernels():
    """Small units have kernels for three sizes, and kernels know whether 16 divides the size."""
    assert encode_launches(TopK(), 64, 128, 256) == encode_launches(TopK(), 64) == 2
    assert encode_launches(TopK(), 64, 1024, 4096) == 6
    assert encode_launches(TopK(), 64, 65) == 4
    both = encode_launches(TopK(), 64, *LARGE, 128)
    assert both == 2 + encode_launches(TopK(), LARGE[0])


def test_decoding_and_recoding_share_launches():
    for numbers in ((LARGE[0],), LARGE):
        units = encodings(TopK(), numbers)
        decodings = [Decoding(TopK(), unit.payload[None], unit.grad, unit.size) for unit in units]
        recodings = [
            Recoding(TopK(), unit.payload, unit.residual, torch.empty_like(unit.payload[0]), unit.size, 1, unit.size)
            for unit in units
        ]
        assert count(TopK().triton.bind_decodes(decodings)) == 3
        assert count(TopK().triton.bind_recodes(recodings)) == 3 + encode_launches(TopK(), LARGE[0])


def test_temporaries_are_limited(monkeypatch):
    one, many = encode_launches(TopK(), LARGE[0]), TopK().triton.bind_encodes(encodings(TopK(), LARGE))
    (together,) = (shared for shared in many._units)
    monkeypatch.setattr(sharing, "MAX_NBYTES", together.nbytes - 1)
    assert encode_launches(TopK(), *LARGE) == 2 * one
    monkeypatch.setattr(sharing, "MAX_NBYTES", 1)
    assert encode_launches(TopK(), *LARGE) == 3 * one


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
def test_many_units_give_what_each_gives(implementation, monkeypatch):
    """Among them are some with and without candidates, in two steps, with other seeds in each."""
    monkeypatch.setattr(encode_kernels, "SMALL", 256)
    monkeypatch.setattr(encode_kernels, "SAMPLES", 2 * MIN_SAMPLE)
    compressor, units = DGC(ratio=0.1), []
    for unit in encodings(compressor, (300, 33, 700)):
        tensors = torch.randn_like(unit.grad), torch.randn_like(unit.residual), unit.payload
        grad, residual, payload = (tensor.to(implementation.device) for tensor in tensors)
        units.append(dataclasses.replace(unit, grad=grad, residual=residual, payload=payload))
    decodings = [Decoding(compressor, unit.payload[None], unit.grad.clone(), unit.size) for unit in units]
    added = number(0, implementation.device)
    encoding = compressor.triton.bind_encodes(units, added=added)
    decoding = compressor.triton.bind_decodes(decodings)
    for step in (0, 2**40 + 1):
        added.fill_(step)
        before = [unit.residual.clone().cpu() for unit in units]
        encoding()
        decoding()
        for unit, residual, decoded in zip(units, before, decodings, strict=True):
            payload, kept = encode(HOST, compressor, unit.grad.cpu(), residual, seed=unit.seed + step)
            assert torch.equal(unit.payload.cpu(), payload)
            assert_equal(unit.residual.cpu(), kept)
            assert_equal(decoded.out.cpu(), decode(HOST, compressor, payload, torch.empty(unit.size)))


def test_recorded_temporaries_take_no_memory_of_the_device():
    with record_launches():
        assert temporary(16, dtype=torch.float32, device=torch.device("meta")).device.type == "cpu"
    assert temporary(16, dtype=torch.float32, device=torch.device("meta")).device.type == "meta"
