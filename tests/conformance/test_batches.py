"""A batch of many units gives the bits of one call per unit, whatever units are combined."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from configurations import CONFIGURATIONS, DEFAULTS, INTERPRETED_IN_KINDS, KINDS, QUICK, for_each, parametrize
from units import assert_same, copied, decodings, encodings, recodings

from cases import cases
from gckernels import ChunkTopK, Identity, RandomK
from gckernels.batch import bind_decodes, bind_encodes, bind_recodes
from gckernels.codec import SEED_MASK, Decoding, Encoding, Recoding
from gckernels.toolkit.kernels import sharing
from gckernels.toolkit.kernels.launch import record_launches
from gckernels.toolkit.sparsifier import Sparsifier, encode_kernels
from helpers import (
    HAS_GPU,
    HOST,
    HOST_PARAM,
    KERNEL,
    KERNEL_PARAM,
    interpreted,
    number,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])


def is_sparsifier(compressor) -> bool:
    """Whether a unit takes many launches, which it shares with units of a similar size."""
    return isinstance(compressor, Sparsifier)


INTERPRETED_QUICKLY = interpreted([each for each in KINDS.values() if not isinstance(each, ChunkTopK | RandomK)])
"""Every kernel's text but two, which take the interpreter longer than all others."""

OF_ITS_OWN = parametrize(lambda compressor: not is_sparsifier(compressor))
SCALE, ADDED = 1 / 3, 0x9E3779B97F4A7C15


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@OF_ITS_OWN
@cases("chunks", [1, pytest.param(4, marks=INTERPRETED_QUICKLY)])
def test_encodes(compressor, implementation, chunks):
    units = encodings(compressor, implementation.device, chunks)
    one_by_one = copied(units)
    memory = number(0, implementation.device)
    work = implementation.backend(compressor).bind_encodes(units, 1.0, memory)
    for added in (0, ADDED) if implementation is HOST else (ADDED,):
        memory.copy_(number(added))
        work()
        for unit in one_by_one:
            seed = (unit.seed + added) & SEED_MASK
            implementation.encode(compressor, unit.grad, unit.residual, unit.payload, unit.size, seed, 1.0)
        assert_same(units, one_by_one)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(lambda compressor: compressor.traits.summable)
def test_encodes_scaled(compressor, implementation):
    units = encodings(compressor, implementation.device, 3)
    one_by_one = copied(units)
    implementation.backend(compressor).bind_encodes(units, SCALE, number(5, implementation.device))()
    for unit in one_by_one:
        seed = (unit.seed + 5) & SEED_MASK
        implementation.encode(compressor, unit.grad, unit.residual, unit.payload, unit.size, seed, SCALE)
    assert_same(units, one_by_one)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@OF_ITS_OWN
@cases(("chunks", "sources", "accumulates"), [(1, 3, False), (4, 1, True)])
def test_decodes(compressor, implementation, chunks, sources, accumulates):
    units = decodings(compressor, implementation.device, chunks, sources)
    one_by_one = copied(units)
    implementation.backend(compressor).bind_decodes(units, SCALE, accumulates)()
    for unit in one_by_one:
        implementation.decode(compressor, unit.payloads, unit.out, unit.size, SCALE, accumulates)
    assert_same(units, one_by_one)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(lambda compressor: not is_sparsifier(compressor), quick=QUICK)
def test_recodes(compressor, implementation):
    units = recodings(compressor, implementation.device)
    one_by_one = copied(units)
    implementation.backend(compressor).bind_recodes(units, SCALE, number(ADDED, implementation.device))()
    for unit in one_by_one:
        seed = (unit.seed + ADDED) & SEED_MASK
        implementation.recode(
            compressor, unit.payloads, unit.residual, unit.payload, unit.numel, unit.size, SCALE, seed
        )
    assert_same(units, one_by_one)


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@parametrize(is_sparsifier, quick=())
@pytest.mark.parametrize("own_launch", [0, sharing.OWN_LAUNCH])
def test_sparsifiers_in_several_steps(compressor, implementation, own_launch, monkeypatch):
    """A second step gives the right bits, too, after other units have used the memory of the temporaries; whether units
    share launches or not, and whether they have candidates or not."""
    monkeypatch.setattr(sharing, "OWN_LAUNCH", own_launch)
    monkeypatch.setattr(encode_kernels, "SMALL", 256)
    monkeypatch.setattr(encode_kernels, "SAMPLES", 1024)
    triton, device = compressor.triton, implementation.device
    encoded = encodings(compressor, device, 2, (torch.float32,), sizes=(1500, 33, 0, 700))
    decoded = decodings(compressor, device, 2, 2, sizes=(33, 1500))
    recoded = recodings(compressor, device, sizes=(33, 600))
    one_by_one = copied(encoded), copied(decoded), copied(recoded)
    memory = number(0, device)
    encodes, decodes = triton.bind_encodes(encoded, 1.0, memory), triton.bind_decodes(decoded, SCALE, True)
    recodes = triton.bind_recodes(recoded, SCALE, memory)
    for added in (0, ADDED):
        memory.copy_(number(added))
        encodes()
        decodes()
        recodes()
        for unit in one_by_one[0]:
            seed = (unit.seed + added) & SEED_MASK
            implementation.encode(compressor, unit.grad, unit.residual, unit.payload, unit.size, seed, 1.0)
        for unit in one_by_one[1]:
            implementation.decode(compressor, unit.payloads, unit.out, unit.size, SCALE, True)
        for unit in one_by_one[2]:
            seed, numel = (unit.seed + added) & SEED_MASK, unit.numel
            arguments = unit.payloads, unit.residual, unit.payload, numel, unit.size, SCALE, seed
            implementation.recode(compressor, *arguments)
        for got, want in zip((encoded, decoded, recoded), one_by_one, strict=True):
            assert_same(got, want)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_units_of_all_compressors_together(device):
    """The functions choose which units are combined; the results are those of the methods."""
    compressors = list(CONFIGURATIONS.values())
    units = [unit for each in compressors for unit in encodings(each, device, 2, sizes=(0, 1, 100, 33))]
    one_by_one = copied(units)
    bind_encodes(units, added=number(ADDED, device))()
    for unit in one_by_one:
        seed = (unit.seed + ADDED) & SEED_MASK
        unit.compressor.encode(unit.grad, unit.residual, unit.payload, seed, size=unit.size)
    assert_same(units, one_by_one)

    outs = [Decoding(unit.compressor, unit.payload[None], torch.randn_like(unit.grad), unit.size) for unit in units]
    one_by_one = copied(outs)
    bind_decodes(outs, SCALE)()
    for unit in one_by_one:
        unit.compressor.decode(unit.payloads, unit.out, SCALE, size=unit.size)
    assert_same(outs, one_by_one)

    # the others would be compiled for this alone
    again = [unit for spec in QUICK for unit in recodings(CONFIGURATIONS[spec], device)]
    one_by_one = copied(again)
    bind_recodes(again, SCALE, number(ADDED, device))()
    for unit in one_by_one:
        seed = (unit.seed + ADDED) & SEED_MASK
        unit.compressor.recode(unit.payloads, unit.residual, unit.payload, unit.numel, SCALE, seed, unit.size)
    assert_same(again, one_by_one)


@DEVICES
def test_nothing_to_do(device):
    bind_encodes([], added=number(3))()
    bind_decodes([])()
    bind_recodes([], added=number(3))()
    empty = encodings(Identity(), device, 1, sizes=(0, 0))
    bind_encodes(empty)()
    assert all((unit.payload == 0).all() for unit in empty)
    bind_decodes([Decoding(Identity(), unit.payload[None], unit.grad, 0) for unit in empty])()


@for_each()
def test_tensors_without_memory_are_bound(compressor):
    """Messages are built of such tensors to find out how much memory they need."""
    numel, nbytes = 1000, compressor.payload_nbytes(1000)
    grad, payload = torch.zeros(numel, device="meta"), torch.zeros(nbytes, dtype=torch.uint8, device="meta")
    residual, shard = (
        torch.zeros(each.traits.states * numel, device="meta") for each in (compressor, compressor.shard_compressor)
    )
    added = number(1, "meta")
    bind_encodes([Encoding(compressor, grad, residual, payload)], added=added)()
    bind_decodes([Decoding(compressor, payload, grad)])()
    bind_recodes([Recoding(compressor, payload[None], shard, payload, numel)], added=added)()


@parametrize(among=DEFAULTS)
def test_what_is_wrong_is_refused_before_anything_is_bound(compressor, monkeypatch):
    """An error in the last unit is found as well, and names the argument."""
    for bind in ("bind_encodes", "bind_decodes", "bind_recodes"):
        monkeypatch.setattr(type(compressor.host), bind, lambda *_: pytest.fail("bound"))
    fine = encodings(compressor, "cpu", 2, sizes=(100, 100))
    wrong = {
        "grad": fine[1].grad.double(),
        "residual": torch.zeros(compressor.traits.states * 100 + 1),
        "payload": fine[1].payload[:, :-16],
        "size": 1,
    }
    for name, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=name):
            bind_encodes([fine[0], dataclasses.replace(fine[1], **{name: value})])
    if not compressor.traits.summable:
        with pytest.raises(ValueError, match="scale"):
            bind_encodes(fine, 0.5)
    for added in (torch.zeros(1), number(0).expand(2), number(0).to("meta")):
        with pytest.raises((TypeError, ValueError), match="added"):
            bind_encodes(fine, added=added)

    fine = decodings(compressor, "cpu", 2, 1)
    with pytest.raises(ValueError, match="payloads"):
        bind_decodes([fine[0], dataclasses.replace(fine[1], payloads=fine[1].payloads[..., :-16])])
    fine = recodings(compressor, "cpu")
    with pytest.raises(ValueError, match="numel"):
        bind_recodes([fine[0], dataclasses.replace(fine[1], numel=-1)])


def launches(compressor, units: list[Encoding]) -> int:
    with record_launches() as recorded:
        compressor.triton.bind_encodes(units)()
    return len(recorded)


@OF_ITS_OWN
def test_one_launch_for_all(compressor):
    """All units share a launch; a second launch handles partial results if statistics are those of whole units."""
    one, many = (
        launches(compressor, encodings(compressor, KERNEL.device, 2, (torch.float32,), sizes, residuals=False))
        for sizes in ((64,), (64, 160, 4096))
    )
    assert one == many <= 2


def test_large_units_are_launched_by_themselves(monkeypatch):
    """The results stay the same."""
    monkeypatch.setattr(sharing, "OWN_LAUNCH", 1000)
    compressor = DEFAULTS["BlockQuant"]
    units = encodings(compressor, KERNEL.device, 1, (torch.float32,), (16, 1600, 32), residuals=False)
    assert launches(compressor, units) == 2
    one_by_one = copied(units)
    compressor.triton.bind_encodes(units)()
    for unit in one_by_one:
        compressor.triton.encode(dataclasses.replace(unit, seed=unit.seed & SEED_MASK))
    assert_same(units, one_by_one)


@pytest.mark.skipif(HAS_GPU, reason="counts calls of the host path")
def test_without_a_compiler_units_are_treated_one_by_one(monkeypatch):
    from gckernels.toolkit.cast import host as cast_host
    from gckernels.toolkit.quantizer import host as quantizer_host

    monkeypatch.setattr(quantizer_host, "build", lambda *_, **__: None)
    monkeypatch.setattr(cast_host, "build", lambda *_: None)
    for compressor in (DEFAULTS["BlockQuant"], DEFAULTS["Cast16"]):
        units = encodings(compressor, "cpu", 2, sizes=(100, 33))
        want = copied(units)
        bind_encodes(units, added=number(1))()
        for unit in want:
            compressor.host.encode(dataclasses.replace(unit, seed=(unit.seed + 1) & SEED_MASK))
        assert_same(units, want)
