"""fp8 in integer arithmetic, in torch and in Triton, gives the bits of torch's casts."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import gckernels
from gckernels.toolkit import fp8
from gckernels.toolkit.constants import Constants
from gckernels.toolkit.quantizer.launches import kernel_constants
from helpers import HAS_GPU, assert_equal
from processes import output_of

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = pytest.mark.parametrize("name", DTYPES)
KERNEL = pytest.param("triton", marks=[pytest.mark.gpu] if HAS_GPU else [])
FORMS = pytest.mark.parametrize("form", ["torch", KERNEL])


@triton.jit
def _encode_kernel(x_ptr, codes_ptr, Q: tl.constexpr, BLOCK: tl.constexpr):
    C: tl.constexpr = Q.C
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    tl.store(codes_ptr + offsets, Q.quantize(tl.load(x_ptr + offsets), (scale,), 0.0, C))


@triton.jit
def _decode_kernel(codes_ptr, x_ptr, Q: tl.constexpr, BLOCK: tl.constexpr):
    C: tl.constexpr = Q.C
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    tl.store(x_ptr + offsets, Q.dequantize(tl.load(codes_ptr + offsets), (scale,), C))


def functions(name: str) -> Constants:
    """The compile-time functions ``Q.quantize`` and ``Q.dequantize`` of the format ``name``."""
    return kernel_constants(gckernels.BlockFP8(format=name))


def encode(form: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """The int32 codes of the fp32 values ``x``."""
    if form == "torch":
        return fp8.encode(x, *fp8.FORMATS[name]).to(torch.int32)
    padded = torch.zeros(-(-x.numel() // 65536) * 65536, device=DEVICE)
    padded[: x.numel()] = x
    codes = torch.empty(padded.shape, dtype=torch.int32, device=DEVICE)
    _encode_kernel[(padded.numel() // 65536,)](padded, codes, Q=functions(name), BLOCK=65536)
    return codes[: x.numel()].cpu()


def decode(form: str, name: str, codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of the 256 int32 codes."""
    mantissa, bias, _ = fp8.FORMATS[name]
    if form == "torch":
        return fp8.decode(codes, mantissa, bias)
    values = torch.empty(256, device=DEVICE)
    _decode_kernel[(1,)](codes.to(DEVICE), values, Q=functions(name), BLOCK=256)
    return values.cpu()


@FORMS
@FORMATS
def test_every_code_decodes_as_torch_casts_it(form, name):
    codes = torch.arange(256, dtype=torch.int32)
    want = codes.to(torch.uint8).view(DTYPES[name]).float()
    got = decode(form, name, codes)
    assert_equal(got, want)
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


@FORMS
@FORMATS
def test_numbers_encode_as_torch_casts_them(form, name):
    """The inputs are every number of the format, every point halfway between two, their neighbours, and random
    floats."""
    numbers = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(DTYPES[name]).float()
    numbers = numbers[numbers <= fp8.FORMATS[name][2]]
    halfway = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat([numbers, halfway])
    bits = points.view(torch.int32)
    random = (torch.rand(50_000) * 0x7F800000).to(torch.int32)
    x = torch.cat([bits - 1, bits, bits + 1, random]).clamp(min=0).view(torch.float32)
    x = torch.cat([x, -x])
    x = x[(x.abs() <= fp8.FORMATS[name][2]) & (x != 0)]
    assert torch.equal(encode(form, name, x), x.to(DTYPES[name]).view(torch.uint8).to(torch.int32))


@FORMS
@FORMATS
def test_too_large_is_the_largest(form, name):
    largest = fp8.FORMATS[name][2]
    x = torch.tensor([largest * 1.0001, largest * 2, 3e38, -3e38])
    codes = encode(form, name, x)
    assert decode("torch", name, codes).tolist() == [largest, largest, largest, -largest]
    assert encode(form, name, torch.zeros(1)).tolist() == [0]


COMPILE = """
import torch
from harness.machine_code.aot import assemble_for_amd, disassemble
from gckernels.testing.configurations import CONFIGURATIONS
from harness.machine_code.launches import calls_of_one

for spec in ("BlockFP8", "BlockFP8(format='e5m2', block=32)"):
    for call, _, launches in calls_of_one(CONFIGURATIONS[spec], torch.bfloat16, 4096, 1, 1, accumulate=False):
        if call in ("encode", "decode"):
            texts = [disassemble(launches[0], capability) for capability in (80, 90)]
            found = [[name for name in ("E4M3", "E5M2") if f".{name}." in text] for text in texts]
            for_amd = bool(assemble_for_amd(launches[0], "gfx942"))
            print(call, *("".join(names) or "integers" for names in found), for_amd)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpus_that_convert_fp8_do():
    """The instructions are there for compute capability 9.0 alone; their results are compared on a GPU, as above."""
    lines = output_of("-c", COMPILE).splitlines()
    assert sorted(lines) == sorted(
        f"{call} integers {name} True" for call in ("encode", "decode") for name in ("E4M3", "E5M2")
    )
