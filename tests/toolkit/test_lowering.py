"""Lowered C computes the same as torch, bit by bit; functions that cannot be lowered raise an error."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays

from gckernels.toolkit.host import compilers, library
from gckernels.toolkit.host.c_forms import FORMS, HELPERS, lower
from gckernels.toolkit.lowering import INT, NotLowered

NASTY_FLOATS = [
    *(0.0, 1.0, 0.1, 0.5, 1.5, 2.5, 3.0, 127.5, 2.0**-126, 2.0**-149, 1e-40, 1e-20, 1e20, 1.9e19, 3.4028234e38),
    *(8388607.5, 8388609.0, 16777217.0, 2147483648.0, math.inf),
]
FLOATS = torch.tensor([sign * each for each in NASTY_FLOATS for sign in (1, -1)] + [math.nan])
INTS = torch.tensor(
    [
        *(0, 1, -1, 2, -3, 7, 8, 31, 32, -31, 127, 128, 255, 65535, 2**24, 2**24 + 1, -(2**24) - 1, 2**30, -(2**30)),
        *(2**31 - 1, -(2**31), 2**31 - 2, 0x7F800000, 0x7FC00000, 0x80000001 - 2**32),
    ],
    dtype=torch.int32,
)
FLOAT_NUMBERS = (0, 3, -7, 2**24 + 1, 2**40, 0.0, -0.0, 0.1, -2.5, 1e-40, 1e30, 1e39, math.inf, -math.inf, math.nan)
INT_NUMBERS = (0, 1, -1, 5, 2**24 + 1, 2**31 - 1, -(2**31), 0xFFFFFFFF)


def with_numbers(
    operation: Callable, integers: bool = True, floats: bool = True, thorough: bool = False
) -> list[Callable]:
    """Functions that apply a binary operation to variables of both types, with numbers on either side. They take all
    the numbers if ``thorough``, otherwise a few, because every function takes time to compile."""
    functions: list[Callable] = []
    step = 1 if thorough else 4
    if floats:
        functions += [lambda x, y, i, j: operation(x, y), lambda x, y, i, j: operation(x, i)]
        functions += [lambda x, y, i, j: operation(j, y), lambda x, y, i, j: operation(i, 0.1)]
        functions += [lambda x, y, i, j, n=n: operation(x, n) for n in FLOAT_NUMBERS[::step]]
        functions += [lambda x, y, i, j, n=n: operation(n, x) for n in FLOAT_NUMBERS[::step]]
    if integers:
        functions += [lambda x, y, i, j: operation(i, j)]
        functions += [lambda x, y, i, j, n=n: operation(i, n) for n in INT_NUMBERS[::step]]
        functions += [lambda x, y, i, j, n=n: operation(n, i) for n in INT_NUMBERS[::step]]
    return functions


def on_both(operation: Callable) -> list[Callable]:
    return [lambda x, y, i, j: operation(x), lambda x, y, i, j: operation(i)]


def logical(operation: Callable) -> list[Callable]:
    """Functions that apply a logical operation to bool, fp32 (where NaN is true) and int32."""
    return [
        lambda x, y, i, j: operation(x > y, i > j),
        lambda x, y, i, j: operation(x, y),
        lambda x, y, i, j: operation(i, j),
        lambda x, y, i, j: operation(x, i > 0),
    ]


def bitwise(operation: Callable) -> list[Callable]:
    bools = lambda x, y, i, j: operation(x > y, i > j)
    return [bools, lambda x, y, i, j: operation(i, x > y), *with_numbers(operation, floats=False)]


def finite(x):
    """The values clamped to those that convert to int32; C leaves other conversions undefined."""
    return torch.where(torch.isnan(x), 0.0, x).clamp(-2147483648.0, 2147483520.0)


CASES: dict[str, list[Callable]] = {
    "add": [*with_numbers(lambda a, b: a + b), lambda x, y, i, j: (x > 0) + (y > 0), lambda x, y, i, j: (x > 0) + 1],
    "sub": [*with_numbers(lambda a, b: a - b, thorough=True), lambda x, y, i, j: torch.sub(x, y)],
    "mul": [*with_numbers(lambda a, b: a * b), lambda x, y, i, j: (x > 0) * y],
    "truediv": with_numbers(lambda a, b: a / b, thorough=True),
    "div": [lambda x, y, i, j: torch.div(x, y), lambda x, y, i, j: x.div(3), lambda x, y, i, j: torch.div(i, j)],
    "neg": on_both(lambda a: -a),
    "pow": [*on_both(lambda a: a**2), *on_both(lambda a: a**2.0)],
    "square": on_both(torch.square),
    "reciprocal": on_both(torch.reciprocal),
    "abs": [*on_both(torch.abs), *on_both(lambda a: a.abs())],
    "sqrt": [lambda x, y, i, j: torch.sqrt(x), lambda x, y, i, j: i.sqrt()],
    "round": on_both(torch.round),
    "floor": on_both(torch.floor),
    "ceil": on_both(torch.ceil),
    "clamp": [
        lambda x, y, i, j: x.clamp(-1, 1),
        lambda x, y, i, j: x.clamp(min=-0.0),
        lambda x, y, i, j: x.clamp(max=-0.0),
        lambda x, y, i, j: x.clamp(0.0, max=2.5),
        lambda x, y, i, j: x.clamp(2.5, 0.5),
        lambda x, y, i, j: x.clamp(max=3, min=-math.inf),
        lambda x, y, i, j: x.clamp(min=y) + 0.0,  # torch does not always keep the same one of two zeros
        lambda x, y, i, j: torch.clamp(x, y, -y) + 0.0,
        lambda x, y, i, j: i.clamp(-(2**24) - 1, 2**24 + 1),
        lambda x, y, i, j: i.clamp(min=j),
        lambda x, y, i, j: i.clamp(-2.5, 3),
    ],
    "clip": [lambda x, y, i, j: x.clip(-0.1, 0.1), lambda x, y, i, j: torch.clip(x, max=5)],
    "minimum": [lambda x, y, i, j: torch.minimum(x, y) + 0.0, lambda x, y, i, j: torch.minimum(i, j)],
    "maximum": [lambda x, y, i, j: torch.maximum(x, y) + 0.0, lambda x, y, i, j: torch.maximum(i, j)],
    "where": [
        lambda x, y, i, j: torch.where(x > y, x, y),
        lambda x, y, i, j: torch.where(x > y, i, j),
        lambda x, y, i, j: torch.where(x > y, i, y),
        lambda x, y, i, j: torch.where(x > y, 1, 2),
        lambda x, y, i, j: torch.where(x > y, 1.5, 2),
        lambda x, y, i, j: torch.where(x > y, i, 0.1),
        lambda x, y, i, j: torch.where(i > j, -0.0, x),
        lambda x, y, i, j: torch.where(i > j, math.inf, -math.inf),
        lambda x, y, i, j: torch.where(i > j, x > y, False),
        lambda x, y, i, j: torch.where(x > 0, torch.where(y > 0, 3, torch.where(i > 0, 2, 1)), 0),
        lambda x, y, i, j: torch.where(x < y, torch.where(x < 0, -x, x * y), torch.where(i < j, y, 0)),
    ],
    "isnan": on_both(torch.isnan),
    "isfinite": on_both(torch.isfinite),
    "view": [
        lambda x, y, i, j: x.view(torch.int32),
        lambda x, y, i, j: i.view(torch.float32),
        lambda x, y, i, j: x.view(torch.float32),
        lambda x, y, i, j: (i.view(torch.int32) & 0x7FFFFFFF).view(torch.float32),
    ],
    "to": [
        lambda x, y, i, j: finite(x).to(torch.int32),
        lambda x, y, i, j: i.to(torch.float32),
        lambda x, y, i, j: x.to(dtype=torch.bool),
        lambda x, y, i, j: (x > y).to(torch.int32),
    ],
    "float": [*on_both(lambda a: a.float()), lambda x, y, i, j: (x > y).float()],
    "int": [lambda x, y, i, j: finite(x).int(), lambda x, y, i, j: i.int(), lambda x, y, i, j: (x > y).int()],
    "gt": [*with_numbers(lambda a, b: a > b), lambda x, y, i, j: torch.gt(x, y)],
    "ge": [*with_numbers(lambda a, b: a >= b, thorough=True), lambda x, y, i, j: x.ge(0)],
    "lt": [*with_numbers(lambda a, b: a < b), lambda x, y, i, j: torch.lt(x, 0.1)],
    "le": [*with_numbers(lambda a, b: a <= b), lambda x, y, i, j: x.le(y)],
    "eq": [*with_numbers(lambda a, b: a == b), lambda x, y, i, j: (x > 0) == (y > 0)],
    "ne": [*with_numbers(lambda a, b: a != b), lambda x, y, i, j: (x > 0) != (y > 0)],
    "and": bitwise(lambda a, b: a & b),
    "or": bitwise(lambda a, b: a | b),
    "xor": bitwise(lambda a, b: a ^ b),
    "logical_and": logical(torch.logical_and),
    "logical_or": logical(torch.logical_or),
    "logical_not": [*on_both(torch.logical_not), lambda x, y, i, j: torch.logical_not(x > y)],
    "invert": [lambda x, y, i, j: ~i, lambda x, y, i, j: ~(x > y)],
    "rshift": with_numbers(lambda a, b: a >> b, floats=False, thorough=True),
    "lshift": with_numbers(lambda a, b: a << b, floats=False, thorough=True),
}
"""Functions of two fp32 and two int32 variables, by the operation that they test."""

FUNCTIONS = [(name, index, function) for name, functions in CASES.items() for index, function in enumerate(functions)]
C_TYPES = {torch.float32: "float", torch.int32: "int32_t", torch.int64: "int32_t", torch.bool: "_Bool"}
INPUTS = ["x[at]", "y[at]", ("i[at]", INT), ("j[at]", INT)]


@functools.cache
def program() -> ctypes.CDLL:
    """All functions in one library, so that the compiler is called once."""
    parts = [library.COMMON, HELPERS, "#define RESTRICTED(type) const type *restrict"]
    for name, index, function in FUNCTIONS:
        kind = C_TYPES[function(FLOATS[:1], FLOATS[:1], INTS[:1], INTS[:1]).dtype]
        parts.append(
            f"void {name}_{index}(RESTRICTED(float) x, RESTRICTED(float) y, RESTRICTED(int32_t) i,"
            f" RESTRICTED(int32_t) j, int64_t count, {kind} *restrict out) {{ for (int64_t at = 0; at < count; at++)"
            f" {{ {' '.join(lower(function, INPUTS, ['out[at]']))} }} }}"
        )
    built = library.library("\n".join(parts))
    if built is None:
        if compilers.compiler() is None:
            pytest.skip("there is no C compiler")
        pytest.fail("the compiler does not accept the program")
    return built


@contextlib.contextmanager
def rounded_roots():
    """Let torch take roots in fp64: MKL, which takes those of long fp32 tensors, does not round all of them
    correctly."""
    with pytest.MonkeyPatch.context() as patch:
        root = torch.sqrt
        for owner in (torch, torch.Tensor):
            patch.setattr(owner, "sqrt", lambda x: root(x.float().double()).float())
        yield


def check(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> None:
    """Assert that every lowered function equals torch for these values of its variables."""
    for name, index, function in FUNCTIONS:
        with rounded_roots():
            want = function(x, y, i, j)
        want = want.to(torch.int32) if want.dtype == torch.int64 else want
        got = torch.empty_like(want)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (x, y, i, j, got)]
        getattr(program(), f"{name}_{index}")(*pointers[:4], ctypes.c_int64(x.numel()), pointers[4])
        assert torch.equal(comparable(got), comparable(want)), f"{name}, function {index}: {got}, not {want}"


def comparable(values: torch.Tensor) -> torch.Tensor:
    """The bits of the values, so that zeros of different sign differ, with the same bits for every NaN."""
    if values.dtype != torch.float32:
        return values
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))


def test_every_form_has_cases():
    assert set(CASES) == set(FORMS)


def test_same_bits_as_torch_on_nasty_values():
    x, y = (torch.tensor(each) for each in zip(*itertools.product(FLOATS.tolist(), repeat=2), strict=True))
    pairs = list(zip(*itertools.product(INTS.tolist(), repeat=2), strict=True))
    i, j = (torch.tensor(each, dtype=torch.int32).repeat(4)[: x.numel()] for each in pairs)
    check(x, y, i, j)


BITS = arrays.arrays(np.int32, (4, 37), elements=st.integers(-(2**31), 2**31 - 1))


@given(BITS)
def test_same_bits_as_torch_on_any_values(bits):
    x, y, i, j = torch.from_numpy(bits)
    check(x.view(torch.float32), y.view(torch.float32), i, j)


def test_a_function_of_several_results_and_constants():
    text = lower(lambda p, count, C: (p[0] / count, p[1] * C["two"]), [["p[0]", "p[1]"], "n", {"two": 2}], ["a", "b"])
    assert text[2:] == ["a = t_truediv_0;", "b = t_mul_1;"]


def test_what_no_result_needs_is_left_out():
    text = lower(lambda x: (x + 1, x * 2)[1], ["x"], ["a"])
    assert "mul" in " ".join(text) and "add" not in " ".join(text)


REFUSED: dict[str, tuple[Callable, str]] = {
    "no form": (lambda x, i: torch.exp(x), "exp"),
    "no form of this type": (lambda x, i: x.to(torch.float16), "to"),
    "no int64": (lambda x, i: i.to(torch.int64), "int64"),
    "number beyond int32": (lambda x, i: torch.where(x > 0, 1, 2**31), "int32"),
    "in place": (lambda x, i: x.add_(1), "add_"),
    "in place, without a use of the result": (lambda x, i: (x.add_(1), x)[1], "add_"),
    "keyword": (lambda x, i: torch.add(x, x, alpha=2), "alpha"),
    "rounded to decimals": (lambda x, i: x.round(decimals=1), "decimals"),
    "rounded division": (lambda x, i: torch.div(x, 3, rounding_mode="floor"), "floor"),
    "other power": (lambda x, i: x**3, "pow"),
    "no bound": (lambda x, i: x.clamp(0, math.nan), "not a number"),
    "view of another shape": (lambda x, i: x.view(1, 1), "view"),
    "reduction": (lambda x, i: x.sum(), "sum"),
    "indices": (lambda x, i: torch.where(x > 0), "where"),
    "attribute": (lambda x, i: x * x.shape[0], "shape|getattr|getitem"),
    "tensor": (lambda x, i: x + torch.tensor([1.0]), "not a number"),
    "branch on a value": (lambda x, i: x if x > 0 else -x, "depends on the values"),
    "loop over values": (lambda x, i: sum(each for each in x), "values|recorded"),
    "number of a value": (lambda x, i: x + float(x), "recorded"),
    "wrong type": (lambda x, i: x & 1, "and"),
    "text": (lambda x, i: "1", "not a number"),
    "too many results": (lambda x, i: (x, x), "2 values"),
    "a mistake": (lambda x, i: x + undefined, "undefined"),  # noqa: F821
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_c_form_is_refused_by_name(what):
    function, pattern = REFUSED[what]
    with pytest.raises(NotLowered, match=pattern):
        lower(function, ["x", ("i", INT)], ["out"])
