"""Triton expressions for element-wise torch functions, used by the kernels; see ``toolkit/lowering.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..lowering import BOOL, FLOAT, INT, OPERATORS, Language, NotLowered, Operand, record, rounded_to_fp32

TYPES = {FLOAT: "tl.float32", INT: "tl.int32", BOOL: "tl.int1"}


def lower(function: Callable[..., Any], inputs: Sequence[Any], kind: str, shaped: str) -> tuple[list[str], list[str]]:
    """The statements of ``function`` in Triton, and the expressions of its results.

    Args:
        function: called with one recorder for every name in ``inputs``.
        inputs: names of variables, see :func:`~gckernels.toolkit.lowering.record`.
        kind: type of the results.
        shaped: a variable. A result that is a number gets its shape.

    Raises:
        NotLowered: the function contains an operation that has no Triton form.
    """
    statements, results = record(function, inputs, TRITON)
    lines = [f"{variable} = {value}" for variable, _, value in statements]
    full = f"tl.full({shaped}.shape, {{}}, {TYPES[kind]})"
    return lines, [full.format(each) if each.kind is None else _as(each, kind) for each in results]


def _literal(value: Any, kind: str) -> str:
    """A Python number as a Triton literal, rounded to fp32 if the operands are fp32."""
    if not isinstance(value, (bool, int, float)):
        raise NotLowered(f"{value!r} is not a number")
    if kind == INT and not isinstance(value, float):
        text = str((int(value) + 2**31) % 2**32 - 2**31)
    else:
        rounded = rounded_to_fp32(value)
        if rounded == 0 and math.copysign(1.0, rounded) < 0:
            return "negative_zero()"
        text = repr(rounded) if math.isfinite(rounded) else f'float("{rounded}")'
    return f"({text})" if text.startswith("-") else text


def _as(x: Operand, kind: str) -> str:
    """``x`` converted to type ``kind``, or unchanged if it is a number or has that type."""
    if x.kind in (None, kind):
        return x
    if (x.kind, kind) == (BOOL, FLOAT):
        return f"tl.where({x}, 1.0, 0.0)"
    return f"({x} != 0)" if kind == BOOL else f"{x}.to({TYPES[kind]})"


def _infix(sign: str) -> Callable[..., str]:
    def form(kind: str, wide: str, a: Operand, b: Operand) -> str:
        if a.kind == b.kind == BOOL and sign in "&|^":
            return f"{a} {sign} {b}"
        value = f"{_as(a, wide)} {sign} {_as(b, wide)}"
        return f"({value}) != 0" if kind == BOOL and sign in "+-*&|^" else value

    return form


def _divide(kind: str, wide: str, a: Operand, b: Operand) -> str:
    if a.kind is None:  # torch divides a number by a tensor as 1 / x * number, rounding twice
        return f"tl.div_rn(1.0, {_as(b, FLOAT)})" + ("" if a == "1.0" else f" * {a}")
    return f"tl.div_rn({_as(a, FLOAT)}, {_as(b, FLOAT)})"


def _choice(kind: str, wide: str, condition: str, a: Operand, b: Operand) -> str:
    if kind == BOOL and None in (a.kind, b.kind):
        return f"tl.where({condition}, {_as(a, INT)}, {_as(b, INT)}) != 0"
    return f"tl.where({condition}, {_as(a, kind)}, {_as(b, kind)})"


def _clamp(kind: str, wide: str, x: Operand, /, min: Operand | None = None, max: Operand | None = None) -> str:
    if 'float("nan")' in (min, max):
        raise NotLowered("clamp: torch's releases disagree about a bound that is not a number")
    value = _as(x, kind)
    if kind == FLOAT and min and max and not (min.kind or max.kind) and _number(min) <= _number(max):
        return f"between({value}, {min}, {max})"  # one instruction where the bounds are a number and its negative
    if min is not None:
        value = _larger(kind, value, _as(min, kind))
    return value if max is None else _smaller(kind, value, _as(max, kind))


def _number(text: str) -> float:
    return float("-0.0" if text == "negative_zero()" else text.removeprefix('float("').strip('()"'))


def _larger(kind: str, a: str, b: str) -> str:
    """The larger of two numbers, NaN if one of them is NaN."""
    return f"at_least({a}, {b})" if kind == FLOAT else f"tl.maximum({a}, {b})"


def _smaller(kind: str, a: str, b: str) -> str:
    return f"at_most({a}, {b})" if kind == FLOAT else f"tl.minimum({a}, {b})"


def _extreme(function: Callable[[str, str, str], str]) -> Callable[..., str]:
    return lambda kind, wide, a, b: function(kind, _as(a, kind), _as(b, kind))


def _rounding(function: str) -> Callable[..., str]:
    return lambda kind, wide, x: f"{function}({x})" if kind == FLOAT else x


def _logical(sign: str) -> Callable[..., str]:
    return lambda kind, wide, a, b: f"{_as(a, BOOL)} {sign} {_as(b, BOOL)}"


def _cast(kind: str, wide: str, x: Operand, /, dtype: torch.dtype | None = None) -> str:
    if dtype not in (None, torch.float32, torch.int32, torch.bool):
        raise NotLowered(f"to: there is no {dtype} in kernels")
    return _as(x, kind)


def _reinterpret(kind: str, wide: str, x: Operand, /, dtype: torch.dtype) -> str:
    if kind == BOOL or not isinstance(dtype, torch.dtype):
        raise NotLowered("view: only between float32 and int32")
    return x if kind == x.kind else f"{x}.to({TYPES[kind]}, bitcast=True)"


def _pow(kind: str, wide: str, x: Operand, exponent: str) -> str:
    if exponent not in ("2", "2.0"):
        raise NotLowered("pow: only squares have a Triton form")
    return f"{_as(x, kind)} * {_as(x, kind)}"


def _shift(sign: str, function: str) -> Callable[..., str]:
    def form(kind: str, wide: str, a: Operand, b: Operand) -> str:
        direct = b.kind is None and b.isdecimal() and int(b) < 32 and a.kind is not None
        return f"{_as(a, INT)} {sign} {b}" if direct else f"{function}({_as(a, INT)}, {_as(b, INT)})"

    return form


FORMS: dict[str, Callable[..., str]] = {
    **{name: _infix(sign) for name, sign in OPERATORS.items()},
    "truediv": _divide,
    "div": _divide,
    "neg": lambda kind, wide, x: f"{x} * -1.0" if kind == FLOAT else f"-{x}",  # in Triton -x is 0 - x, never -0.0
    "pow": _pow,
    "square": lambda kind, wide, x: f"{x} * {x}",
    "reciprocal": lambda kind, wide, x: f"tl.div_rn(1.0, {_as(x, FLOAT)})",
    "abs": lambda kind, wide, x: f"tl.abs({x})",
    "sqrt": lambda kind, wide, x: f"tl.sqrt_rn({_as(x, FLOAT)})",
    "round": _rounding("nearest"),
    "floor": _rounding("tl.floor"),
    "ceil": _rounding("tl.ceil"),
    "clamp": _clamp,
    "clip": _clamp,
    "minimum": _extreme(_smaller),
    "maximum": _extreme(_larger),
    "where": _choice,
    "isnan": lambda kind, wide, x: f"{x} != {x}",
    "isfinite": lambda kind, wide, x: f"is_finite({x})" if x.kind == FLOAT else f"{x} == {x}",
    "view": _reinterpret,
    "to": _cast,
    "float": _cast,
    "int": _cast,
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_not": lambda kind, wide, x: f"{_as(x, INT)} == 0" if x.kind == BOOL else f"{x} == 0",
    "invert": lambda kind, wide, x: f"{_as(x, INT)} == 0" if kind == BOOL else f"~{x}",
    "rshift": _shift(">>", "shifted_right"),
    "lshift": _shift("<<", "shifted_left"),
}
"""Functions that write Triton expressions, by operation: ``(result type, type of the operands, operands ...)``."""

TRITON = Language("Triton", FORMS, _literal)
