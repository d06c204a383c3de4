"""C expressions for element-wise torch functions, used by the host path; see ``toolkit/lowering.py``.

Every operation becomes one C statement on scalars, which the compiler vectorises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..lowering import BOOL, FLOAT, INT, OPERATORS, Language, NotLowered, Operand, record, rounded_to_fp32

HELPERS = """
/* 0 or 1, as wide as the numbers beside it: compilers vectorise it better than _Bool */
typedef int32_t bool_t;
SHARED inline float least(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
SHARED inline float most(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
SHARED inline float at_least(float x, float low) { return x < low || low != low ? low : x; }
SHARED inline float at_most(float x, float high) { return x > high || high != high ? high : x; }
SHARED inline int32_t shifted_left(int32_t x, int32_t n) { return (uint32_t)n < 32 ? (int32_t)((uint32_t)x << n) : 0; }
SHARED inline int32_t shifted_right(int32_t x, int32_t n) { return x >> ((uint32_t)n < 32 ? n : 31); }
"""
"""C functions that translated code calls, in addition to the functions in ``toolkit/host/common.c``."""


def lower(function: Callable[..., Any], inputs: Sequence[Any], returns: Sequence[str]) -> list[str]:
    """The C statements of ``function``.

    Args:
        function: called with one recorder for every name in ``inputs``.
        inputs: names of C variables, see :func:`~gckernels.toolkit.lowering.record`.
        returns: the variables that the results (one or a tuple) are assigned to. The caller declares them.

    Raises:
        NotLowered: the function contains an operation that has no C form.
    """
    statements, results = record(function, inputs, C)
    if len(results) != len(returns):
        raise NotLowered(f"it returns {len(results)} values instead of {len(returns)}")
    lines = [f"{kind} {variable} = {value};" for variable, kind, value in statements]
    return lines + [f"{name} = {result};" for name, result in zip(returns, results, strict=True)]


def _literal(value: Any, kind: str) -> str:
    """A Python number as a C literal, of type fp32 if the operands are fp32."""
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, (int, float)):
        raise NotLowered(f"{value!r} is not a number")
    if kind == INT and isinstance(value, int):
        return f"((int32_t){value & 0xFFFFFFFF}u)"
    rounded = rounded_to_fp32(value)
    if math.isnan(rounded) or math.isinf(rounded):
        return "NAN" if math.isnan(rounded) else "INFINITY" if rounded > 0 else "(-INFINITY)"
    return f"({rounded.hex()}f)"


def _infix(sign: str) -> Callable[..., str]:
    return lambda kind, wide, a, b: f"({wide})({a}) {sign} ({wide})({b})"


def _divide(kind: str, wide: str, a: Operand, b: str) -> str:
    if a.kind is None:  # torch divides a number by a tensor as 1 / x * number, rounding twice
        return f"1.0f / (float)({b}) * {a}"
    return f"(float)({a}) / (float)({b})"


def _choice(kind: str, wide: str, condition: str, a: str, b: str) -> str:
    return f"{condition} ? ({kind})({a}) : ({kind})({b})"


def _clamp(kind: str, wide: str, x: str, /, min: str | None = None, max: str | None = None) -> str:
    if "NAN" in (min, max):
        raise NotLowered("clamp: torch's releases disagree about a bound that is not a number")
    value = f"({kind})({x})"
    if min is not None:
        value = f"at_least({value}, {min})" if kind == FLOAT else f"({value} < {min} ? {min} : {value})"
    if max is not None:
        value = f"at_most({value}, {max})" if kind == FLOAT else f"({value} > {max} ? {max} : {value})"
    return value


def _extreme(function: str, sign: str) -> Callable[..., str]:
    return lambda kind, wide, a, b: f"{function}({a}, {b})" if kind == FLOAT else f"{a} {sign} {b} ? {a} : {b}"


def _rounding(function: str) -> Callable[..., str]:
    return lambda kind, wide, x: f"{function}({x})" if kind == FLOAT else x


def _logical(sign: str) -> Callable[..., str]:
    return lambda kind, wide, a, b: f"({a} != 0) {sign} ({b} != 0)"


def _cast(kind: str, wide: str, x: str, /, dtype: torch.dtype | None = None) -> str:
    if dtype not in (None, torch.float32, torch.int32, torch.bool):
        raise NotLowered(f"to: there is no {dtype} in C")
    return f"({x}) != 0" if kind == BOOL else f"({kind})({x})"


def _reinterpret(kind: str, wide: str, x: str, /, dtype: torch.dtype) -> str:
    if kind == BOOL or not isinstance(dtype, torch.dtype):
        raise NotLowered("view: only between float32 and int32")
    return x if kind == wide else f"bits_of({x})" if kind == INT else f"float_of({x})"


def _pow(kind: str, wide: str, x: str, exponent: str) -> str:
    if exponent not in (_literal(2, INT), _literal(2, FLOAT)):
        raise NotLowered("pow: only squares have a C form")
    return f"({kind})({x}) * ({kind})({x})"


FORMS: dict[str, Callable[..., str]] = {
    **{name: _infix(sign) for name, sign in OPERATORS.items()},
    "truediv": _divide,
    "div": _divide,
    "neg": lambda kind, wide, x: f"-{x}",
    "pow": _pow,
    "square": lambda kind, wide, x: f"{x} * {x}",
    "reciprocal": lambda kind, wide, x: f"1.0f / {x}",
    "abs": lambda kind, wide, x: f"fabsf({x})" if kind == FLOAT else f"({x} < 0 ? -{x} : {x})",
    "sqrt": lambda kind, wide, x: f"sqrtf({x})",
    "round": _rounding("rintf"),
    "floor": _rounding("floorf"),
    "ceil": _rounding("ceilf"),
    "clamp": _clamp,
    "clip": _clamp,
    "minimum": _extreme("least", "<"),
    "maximum": _extreme("most", ">"),
    "where": _choice,
    "isnan": lambda kind, wide, x: f"{x} != {x}",
    "isfinite": lambda kind, wide, x: f"fabsf({x}) <= 0x1.fffffep127f",
    "view": _reinterpret,
    "to": _cast,
    "float": _cast,
    "int": _cast,
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_not": lambda kind, wide, x: f"!{x}",
    "invert": lambda kind, wide, x: f"!{x}" if kind == BOOL else f"~{x}",
    "rshift": lambda kind, wide, a, b: f"shifted_right({a}, {b})",
    "lshift": lambda kind, wide, a, b: f"shifted_left({a}, {b})",
}
"""Functions that write C expressions, by operation: ``(result type, type of the operands, operands ...)``."""

C = Language("C", FORMS, _literal)
