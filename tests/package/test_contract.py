"""The base class of compressors: chunks, the table of compressors, names."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import gckernels
from gckernels import CODECS, Codec, chunk_numel, register
from gckernels.registration import define_ops
from gckernels.toolkit.fields import require_block, require_in


def test_chunk_numel_examples():
    assert chunk_numel(100, 4) == 32
    assert chunk_numel(5, 4) == 16
    assert chunk_numel(5, 1) == 5
    assert chunk_numel(0, 3) == 0


@given(numel=st.integers(0, 2**40), chunks=st.integers(1, 5000))
def test_chunks_cover_the_unit(numel, chunks):
    size = chunk_numel(numel, chunks)
    assert size * chunks >= numel
    if chunks == 1:
        assert size == numel
    else:
        assert size % 16 == 0
        assert size - 16 < -(-numel // chunks)  # at most rounded up for alignment


@pytest.mark.parametrize("name", sorted(CODECS))
def test_table(name):
    cls = CODECS[name]
    assert cls.__name__ == cls().name == name
    assert getattr(gckernels, name) is cls
    assert name in gckernels.__all__
    assert cls.op_name == name.lower()
    for verb in ("encode", "decode", "recode"):
        assert hasattr(torch.ops.gckernels, f"{cls.op_name}_{verb}")
    assert cls().rounds >= 1
    assert not cls().traits.summable or cls().traits.payload_dtype in (torch.float32, torch.bfloat16, torch.float16)


def test_a_name_is_registered_once():
    before = dict(CODECS)
    with pytest.raises(ValueError, match="EFSignSGD"):
        register(type("EFSignSGD", (gckernels.EFSignSGD,), {}))
    assert before == CODECS


def test_only_frozen_dataclasses_are_registered():
    @dataclass(frozen=True)
    class Undecorated(Codec):
        pass

    class Inherits(Undecorated):
        pass

    for cls in (Inherits, type("Plain", (Codec,), {})):
        with pytest.raises(TypeError, match=cls.__name__):
            register(cls)
        assert cls.__name__ not in CODECS


def test_fields_that_an_op_cannot_take_are_refused():
    @dataclass(frozen=True)
    class WithList(Codec):
        ratios: list[float] = ()

    with pytest.raises(TypeError, match=r"WithList\.ratios"):
        define_ops(WithList)


@given(st.integers(-10, 40_000))
def test_require_block(block):
    allowed = block in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    if allowed:
        require_block("Name", block, 128, optional=False)
    else:
        with pytest.raises(ValueError, match=r"Name: block.*128 to 16384"):
            require_block("Name", block, 128, optional=False)


def test_require_block_optional():
    require_block("Name", None, 128, optional=True)
    with pytest.raises(ValueError, match="block"):
        require_block("Name", None, 128, optional=False)
    with pytest.raises(ValueError, match="None or a power of two"):
        require_block("Name", 100, 128, optional=True)


@pytest.mark.parametrize("value", [4.0, True, "4", None, [4], 5], ids=repr)
def test_require_in_refuses_look_alikes(value):
    require_in("Name", "bits", 4, (4, 1))
    with pytest.raises(ValueError, match="Name: bits must be one of 4, 1"):
        require_in("Name", "bits", value, (4, 1))
