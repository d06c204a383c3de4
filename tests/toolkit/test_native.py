"""The host path is compiled where it runs: functions without a C form, failures to compile, and 16-bit numbers."""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import gckernels
from gckernels.toolkit.host import compilers, library
from gckernels.toolkit.quantizer import MapQuantizer, Maps
from gckernels.toolkit.quantizer.statistics import MEAN_MAGNITUDE
from helpers import HOST, REFERENCE, assert_equal, decode, encode

COMPRESSORS = (
    *(gckernels.EFSignSGD(), gckernels.BlockQuant(bits=4), gckernels.Cast16()),
    *(gckernels.ChunkTopK(), gckernels.TopK()),
)


def check(compressor: gckernels.Codec, numel: int = 3000) -> None:
    """Assert that encode, decode and recode equal the reference."""
    grad, residual = torch.randn(numel), torch.randn(numel)
    got, kept = encode(HOST, compressor, grad, residual, chunks=2)
    want, left = encode(REFERENCE, compressor, grad, residual, chunks=2)
    if "sum" not in getattr(getattr(getattr(compressor, "maps", None), "statistic", None), "kinds", ()):
        assert torch.equal(got, want)
        assert_equal(kept, left)
    assert_equal(decode(HOST, compressor, got, grad), decode(REFERENCE, compressor, got, grad))


def reasons(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught]


# -------------------------------------------------------------------- functions without a C form


@dataclass(frozen=True)
class WithoutForm(MapQuantizer):
    """A quantiser without kernels, whose code comes from a function that has no C form."""

    bits: ClassVar[int] = 1
    block: int | None = 128
    maps = Maps(
        quantize=lambda values, stats, dither, C: torch.exp(values) >= 1,
        dequantize=lambda codes, stats, C: torch.where(codes == 1, stats[0], -stats[0]),
        statistic=MEAN_MAGNITUDE,
    )


def _branching(values, stats, dither, C):
    return values >= 0 if values.numel() > 0 and bool((values > 0).any()) else values > 0


@dataclass(frozen=True)
class Branching(WithoutForm):
    """A quantiser whose code branches in Python, depending on the values."""

    maps = Maps(
        quantize=_branching,
        dequantize=WithoutForm.maps.dequantize,
        statistic=MEAN_MAGNITUDE,
    )


@dataclass(frozen=True)
class OddBlocks(WithoutForm):
    """A quantiser whose blocks do not fill the host path's tiles."""

    block: int | None = 96
    maps = gckernels.EFSignSGD().maps


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [(WithoutForm(), "WithoutForm .*: exp"), (Branching(), "Branching"), (OddBlocks(), "OddBlocks .*block")],
    ids=["no form", "control flow", "odd blocks"],
)
def test_a_quantiser_that_cannot_be_lowered_works_all_the_same(afresh, quantizer, reason):
    with pytest.warns(UserWarning, match=f"20 to 150 times slower, because {reason}") as caught:
        check(quantizer)
        check(quantizer)
    assert len(caught) == 1


# -------------------------------------------------------------------- missing and failing compilers


def test_without_a_compiler_everything_works_with_one_warning(afresh, tmp_path):
    afresh.setenv("PATH", str(tmp_path))
    afresh.delenv("CC", raising=False)
    afresh.setattr(compilers, "_packaged", list)
    with pytest.warns(UserWarning, match="there is no C compiler") as caught:
        for compressor in COMPRESSORS:
            check(compressor)
    assert len(caught) == 1, reasons(caught)


@pytest.mark.parametrize("command", ["false", "sh -c 'echo no licence >&2; exit 3'"])
def test_a_compiler_that_fails_is_named_once(afresh, command):
    afresh.setenv("CC", command)
    with pytest.warns(UserWarning, match="the C compiler fails") as caught:
        for compressor in COMPRESSORS:
            check(compressor)
    assert len(caught) == 1, reasons(caught)
    assert ("no licence" if "licence" in command else "exit status 1") in reasons(caught)[0]


def test_what_the_compiler_does_not_accept_is_reported(afresh, compiler):
    with pytest.warns(UserWarning, match="(?s)the C compiler fails: .*nonsense"):
        assert library.library("nonsense") is None


# -------------------------------------------------------------------- 16-bit numbers

CONVERSIONS = """
void load_all(const void *from, int32_t dtype, int64_t n, float *to) { load(from, dtype, 0, (int)n, to); }
void store_all(void *to, int32_t dtype, int64_t n, const float *from) { store(to, dtype, 0, (int)n, from); }
"""


@pytest.mark.parametrize("prefix", ["", "#undef __FLT16_MAX__\n"], ids=["as it is", "without _Float16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_converted_as_torch_does(dtype, prefix):
    """Tested are all 16-bit numbers, and the fp32 numbers at, below and above them and around their midpoints."""
    built = library.library(prefix + library.COMMON + CONVERSIONS)
    if built is None:
        pytest.skip("there is no C compiler")
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    loaded = torch.empty(2**16)
    count, code = ctypes.c_int64(2**16), ctypes.c_int32(library.DTYPES[dtype])
    built.load_all(ctypes.c_void_p(every.data_ptr()), code, count, ctypes.c_void_p(loaded.data_ptr()))
    assert_equal(loaded, every.float())
    half = 1 << (15 if dtype == torch.bfloat16 else 12)
    for offset in (-half - 1, -half, -half + 1, -1, 0, 1, half - 1, half, half + 1):
        values = (every.float().view(torch.int32) + offset).view(torch.float32)
        stored = torch.empty(2**16, dtype=dtype)
        built.store_all(ctypes.c_void_p(stored.data_ptr()), code, count, ctypes.c_void_p(values.data_ptr()))
        assert_equal(stored, values.to(dtype))
        same = stored.view(torch.int16) == values.to(dtype).view(torch.int16)
        assert (same | values.isnan()).all(), "zeros have the same sign"


def test_views_at_odd_elements_and_payloads_at_any_sixteen_bytes():
    """The C code accepts all of torch's tensors, which may be aligned to a single element."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for compressor in COMPRESSORS:
            memory, kept, out = torch.randn(3001).to(dtype), torch.randn(3003), torch.zeros(3001, dtype=dtype)
            nbytes = compressor.payload_nbytes(3000)
            buffer = torch.zeros(nbytes + 64, dtype=torch.uint8)
            payload = buffer[16 : 16 + nbytes]
            want_payload, want_kept = encode(HOST, compressor, memory[1:].clone(), kept[3:].clone())
            compressor.encode(memory[1:], kept[3:], payload)
            assert torch.equal(payload, want_payload[0])
            assert_equal(kept[3:], want_kept)
            compressor.decode(payload, out[1:])
            assert_equal(out[1:], decode(HOST, compressor, want_payload, torch.zeros(3000, dtype=dtype)))
