"""Torch functions that are written in Triton compute the same as torch, bit by bit."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl
from test_lowering import FLOATS, FUNCTIONS, INTS, comparable, rounded_roots

import gckernels
from gckernels.toolkit.host import c_forms
from gckernels.toolkit.kernels import triton_forms
from gckernels.toolkit.lowering import BOOL, FLOAT, INT, NotLowered, record
from gckernels.toolkit.numeric import small_to_fp32_torch
from gckernels.toolkit.quantizer import Dual, MapQuantizer, Maps, generated
from gckernels.toolkit.quantizer.statistics import MEAN_MAGNITUDE
from helpers import HAS_GPU

DEVICE = "cuda" if HAS_GPU else "cpu"
COUNT = 2048
KINDS = {torch.float32: FLOAT, torch.int32: INT, torch.int64: INT, torch.bool: BOOL}
HEAD = """import triton
import triton.language as tl

from gckernels.toolkit.numeric import (
    at_least, at_most, between, is_finite, nearest, negative_zero, shifted_left, shifted_right
)
"""
KERNEL = """

@triton.jit
def {name}(x_ptr, y_ptr, i_ptr, j_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y, i, j = tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(i_ptr + at), tl.load(j_ptr + at)
    {statements}
    tl.store(out_ptr + at, {result})
"""
UNORDERED_ZEROS = ("clamp", "clip")
"""Operations that may return either of two zeros if a bound is zero."""


def kernel(name: str, function) -> str:
    """The source of a kernel that stores the results of ``function`` of ``x``, ``y``, ``i`` and ``j``."""
    kind = KINDS[function(FLOATS[:1], FLOATS[:1], INTS[:1], INTS[:1]).dtype]
    lines, (result,) = triton_forms.lower(function, ["x", "y", ("i", INT), ("j", INT)], kind, "x")
    return KERNEL.format(name=name, statements="\n    ".join(lines), result=result)


def test_every_operation_has_a_form_in_both_languages():
    assert set(triton_forms.FORMS) == set(c_forms.FORMS)


@pytest.mark.gpu if HAS_GPU else lambda test: test
def test_same_bits_as_torch_on_nasty_values():
    text = HEAD + "".join(kernel(f"{name}_{index}", function) for name, index, function in FUNCTIONS)
    module = generated._module("forms", text)
    pairs = list(zip(*itertools.product(FLOATS.tolist(), repeat=2), strict=True))
    x, y = (torch.tensor(each).repeat(2)[:COUNT] for each in pairs)
    numbers = zip(*itertools.product(INTS.tolist(), repeat=2), strict=True)
    i, j = (torch.tensor(each, dtype=torch.int32).repeat(4)[:COUNT] for each in numbers)
    wrong = []
    for name, index, function in FUNCTIONS:
        with rounded_roots():
            want = function(x, y, i, j)
        want = want.to(torch.int32) if want.dtype == torch.int64 else want
        got = torch.empty_like(want, device=DEVICE)
        getattr(module, f"{name}_{index}")[(1,)](*(each.to(DEVICE) for each in (x, y, i, j)), got, COUNT=COUNT)
        if name in UNORDERED_ZEROS and want.dtype == torch.float32:
            want, got = want + 0.0, got + 0.0
        if not torch.equal(comparable(got.cpu()), comparable(want)):
            wrong.append(f"{name}_{index}")
    assert not wrong


def test_a_number_as_the_result_has_the_shape_of_the_values():
    assert triton_forms.lower(lambda values, C: (values, 1.5), ["values", None], FLOAT, "values") == (
        [],
        ["values", "tl.full(values.shape, 1.5, tl.float32)"],
    )


def test_no_form_is_refused_by_name():
    with pytest.raises(NotLowered, match="exp has no Triton form"):
        record(lambda x: torch.exp(x), ["x"], triton_forms.TRITON)


@dataclass(frozen=True)
class WithoutForm(MapQuantizer):
    """A quantiser whose code comes from a function that has no Triton form."""

    bits: ClassVar[int] = 1
    block: int | None = 128
    maps = Maps(
        lambda values, stats, dither, C: torch.exp(values) >= 1, gckernels.EFSignSGD().maps.dequantize, MEAN_MAGNITUDE
    )


def test_a_function_without_a_form_is_named():
    with pytest.raises(NotLowered, match="WithoutForm: quantize: exp has no Triton form"):
        generated.triton_functions(WithoutForm())


def decoding_by(dequantize: Any, bits: int = 4) -> MapQuantizer:
    """A quantiser with this map from codes to values."""

    @dataclass(frozen=True)
    class Decoding(MapQuantizer):
        maps = Maps(gckernels.BlockQuant(bits=4).maps.quantize, dequantize, MEAN_MAGNITUDE)
        block: int | None = 128

    Decoding.bits = bits
    return Decoding()


@pytest.mark.parametrize(
    ("dequantize", "form"),
    [
        (lambda codes, stats, C: codes.float() * stats[0], (15, 0, False)),
        (lambda codes, stats, C: small_to_fp32_torch(codes, 8) * stats[0], (15, 8, False)),
        (
            lambda codes, stats, C: (small_to_fp32_torch(codes & 7, 1).view(torch.int32) | ((codes & 8) << 28)).float(),
            (7, 1, True),
        ),
        (lambda codes, stats, C: stats[0] + small_to_fp32_torch(codes & 6), None),
        (lambda codes, stats, C: small_to_fp32_torch(codes, 1) * small_to_fp32_torch(codes, 2), None),
        (lambda codes, stats, C: torch.where(codes == 1, stats[0], stats[0] * codes.float()), None),
        (lambda codes, stats, C: codes.float() * (codes & 8), None),
        (lambda codes, stats, C: codes.float() * ((codes & 4) << 28), None),
        (lambda codes, stats, C: codes * stats[0], None),
        (lambda codes, stats, C: codes.float() if codes else stats[0], None),
        (lambda codes, stats, C: stats[0], None),
    ],
)
def test_codes_that_are_only_numbers_are_given_as_numbers(dequantize, form):
    found = generated.number_form(decoding_by(dequantize))
    assert (found and (found.mask, found.zero, found.signed)) == form


def test_a_hand_written_form_replaces_the_generated_one():
    by_hand = generated.triton_functions(gckernels.EFSignSGD())["quantize"]

    @dataclass(frozen=True)
    class ByHand(WithoutForm):
        maps = Maps(Dual(WithoutForm.maps.quantize, by_hand), WithoutForm.maps.dequantize, MEAN_MAGNITUDE)

    assert torch.equal(ByHand.maps.quantize(torch.zeros(3), (), None, None), torch.ones(3, dtype=torch.bool))
    functions = generated.triton_functions(ByHand())
    assert functions["quantize"] is by_hand
    assert functions["dequantize"] is not by_hand
    assert f"# quantize: {by_hand.__module__}.quantize" in generated.triton_source(ByHand())


@triton.jit
def never_called(values, stats, dither, C: tl.constexpr):
    return values


def test_a_hand_written_form_for_some_gpus_is_a_branch_of_the_generated_one():
    @dataclass(frozen=True)
    class OnSome(WithoutForm):
        maps = dataclasses.replace(
            gckernels.EFSignSGD().maps,
            quantize=Dual(gckernels.EFSignSGD().maps.quantize, never_called, capability=1000),
        )

    text = generated.triton_source(OnSome())
    assert f"from {__name__} import never_called\n" in text
    assert "    if for_nvidia(1000):\n        return never_called(values, stats, dither, C)\n    else:\n" in text
    assert generated.triton_functions(OnSome())["quantize"] is not never_called


def source_files(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".py"}


GENERATE = (
    "import gckernels\n"
    "from gckernels.toolkit.quantizer import generated\n"
    "import inspect\n"
    "function = generated.triton_functions(gckernels.EFSignSGD())['quantize']\n"
    "print(inspect.getsource(function.fn))\n"
)


def run(folder, **environment: str) -> subprocess.Popen:
    """A process that generates the functions in ``folder``."""
    variables = os.environ | {"GCKERNELS_CACHE": str(folder)} | environment
    return subprocess.Popen([sys.executable, "-c", GENERATE], env=variables, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_several_processes_keep_the_same_file(tmp_path):
    texts = [process.communicate(timeout=200)[0] for process in [run(tmp_path), run(tmp_path, TRITON_INTERPRET="0")]]
    assert texts[0] == texts[1] and "def quantize(values, stats, dither, C: tl.constexpr):" in texts[0]
    ((name, text),) = source_files(tmp_path).items()
    assert name.startswith("efsignsgd_")
    assert text == generated.triton_source(gckernels.EFSignSGD())
    assert [path.name for path in tmp_path.iterdir()] == [name]  # no partly written file remains


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path, monkeypatch):
    class Unwritten(gckernels.EFSignSGD):
        """Its functions have not been generated yet."""

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("GCKERNELS_CACHE", str(file))
    function = generated.triton_functions(Unwritten())["quantize"]
    assert "def quantize(values, stats, dither, C: tl.constexpr):" in inspect.getsource(function.fn)
    assert not file.read_text()


def test_a_dual_is_called_as_its_torch_form():
    assert Dual(lambda values, C: values + C, None)(torch.ones(2), 2).tolist() == [3.0, 3.0]
