"""From element-wise torch functions to C expressions.

A quantiser's functions are recorded with ``torch.fx`` and every operation becomes one C statement on scalars; the
compiler makes vectors of them. The types are those that torch gives: fp32, int32 or bool. One operation rounds once,
as in torch, so the results have the same bits. Where torch makes int64 of Python numbers, as in
``torch.where(x > 0, 1, 2)``, C computes in int32: the values must fit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

FLOAT, INT, BOOL = "float", "int32_t", "bool_t"
_SAMPLES = {FLOAT: torch.ones(1), INT: torch.ones(1, dtype=torch.int32), BOOL: torch.ones(1, dtype=torch.bool)}
_TYPES = {torch.float32: FLOAT, torch.int32: INT, torch.int64: INT, torch.bool: BOOL}

HELPERS = """
/* 0 or 1, as wide as the numbers beside it: compilers make better vectors of it than of _Bool */
typedef int32_t bool_t;
SHARED inline float least(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
SHARED inline float most(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
SHARED inline float at_least(float x, float low) { return x < low || low != low ? low : x; }
SHARED inline float at_most(float x, float high) { return x > high || high != high ? high : x; }
SHARED inline int32_t shifted_left(int32_t x, int32_t n) { return (uint32_t)n < 32 ? (int32_t)((uint32_t)x << n) : 0; }
SHARED inline int32_t shifted_right(int32_t x, int32_t n) { return x >> ((uint32_t)n < 32 ? n : 31); }
"""
"""C functions that lowered code calls, besides those of ``toolkit/host/common.c``."""


Values = dict[fx.Node, tuple[str, torch.Tensor]]  # a node's C variable, and a sample of its value


class NotLowered(TypeError):
    """A function does something that has no C form here."""


def lower(function: Callable[..., Any], inputs: Sequence[Any], returns: Sequence[str]) -> str:
    """The C statements of ``function``.

    Args:
        function: called with one recorder for every name in ``inputs``.
        inputs: C variables by name, fp32 unless given as ``(name, type)``; a list is passed as a tuple; anything else
            is passed as it is.
        returns: the variables that the results, one or a tuple, are assigned to; declared by the caller.

    Raises:
        NotLowered: naming the operation, or with what tracing failed: a wrong function is for the reference to report.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    env: Values = {}

    def record(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(record(each) for each in value)
        if not isinstance(value, (str, tuple)):
            return value
        name, kind = (value, FLOAT) if isinstance(value, str) else value
        node = graph.placeholder(name)
        env[node] = name, _SAMPLES[kind]
        return fx.Proxy(node, tracer)

    try:
        results = function(*(record(value) for value in inputs))
    except fx.proxy.TraceError as error:
        raise NotLowered(f"what it does depends on the values: {error}") from error
    except Exception as error:
        raise NotLowered(f"it cannot be recorded: {type(error).__name__}: {error}") from error
    results = results if isinstance(results, (tuple, list)) else (results,)
    statements: dict[fx.Node, str] = {}
    for node in graph.nodes:  # also what no result needs: it might have changed something in place
        if node.op != "placeholder":
            statements[node] = _statement(node, env, len(statements))
    needed = {result.node for result in results if isinstance(result, fx.Proxy)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    lines = [statement for node, statement in statements.items() if node in needed]
    if len(results) != len(returns):
        raise NotLowered(f"it returns {len(results)} values instead of {len(returns)}")
    for name, result in zip(returns, results, strict=True):
        lines.append(f"{name} = {env[result.node][0] if isinstance(result, fx.Proxy) else _literal(result, FLOAT)};")
    return " ".join(lines)


def _statement(node: fx.Node, env: Values, number: int) -> str:
    """The declaration of a node's variable, which is put into ``env``, with a sample of its value."""
    if node.op not in ("call_function", "call_method"):
        raise NotLowered(f"{node.op} {node.target}")
    name = str(node.target) if node.op == "call_method" else node.target.__name__  # type: ignore[union-attr]
    form = _FORMS.get(_plain(name, node))
    if form is None:
        raise NotLowered(f"{name} has no C form; there are {', '.join(sorted(_FORMS))}")
    samples = [fx.node.map_arg(given, lambda each: env[each][1]) for given in (node.args, node.kwargs)]
    function = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
    try:
        sample = function(*samples[0], **samples[1])  # type: ignore[operator, arg-type]
    except Exception as error:
        raise NotLowered(f"{name} fails: {error}") from error
    kind = _TYPES.get(getattr(sample, "dtype", None))  # type: ignore[arg-type]
    if kind is None or sample.shape != (1,):
        raise NotLowered(f"{name} gives something else than one float32, int32 or bool for every element")
    given = (*node.args, *node.kwargs.values())
    dtypes = [env[each][1].dtype for each in given if isinstance(each, fx.Node)]
    wide = FLOAT if torch.float32 in dtypes or any(isinstance(each, float) for each in given) else INT
    if form is _divide:
        wide = FLOAT
        if not isinstance(given[0], fx.Node):
            form = _divide_number
    if torch.int64 in (*dtypes, sample.dtype) and any(isinstance(each, int) and _overflows(each) for each in given):
        raise NotLowered(f"{name}: a number does not fit int32")

    def operand(value: Any) -> Any:
        return env[value][0] if isinstance(value, fx.Node) else _constant(value, wide)

    variable = f"t_{node.name}_{number}"
    try:
        value = form(kind, wide, *map(operand, node.args), **{key: operand(each) for key, each in node.kwargs.items()})
    except NotLowered:
        raise
    except TypeError as error:
        raise NotLowered(f"{name} has no C form with these arguments: {error}") from error
    env[node] = variable, sample
    return f"{kind} {variable} = {value};"


def _plain(name: str, node: fx.Node) -> str:
    """The name of the operation: ``and`` of ``operator.and_`` and ``__and__``; not ``add`` of ``add_``, in place."""
    if name.startswith("__") or getattr(node.target, "__module__", None) == "_operator":
        return name.strip("_")
    return name


def _overflows(value: int) -> bool:
    return not -(2**31) <= value < 2**31


def _constant(value: Any, kind: str) -> Any:
    """What a form takes that is not a variable: a number as text, a type or nothing as it is."""
    return value if value is None or isinstance(value, torch.dtype) else _literal(value, kind)


def _literal(value: Any, kind: str) -> str:
    """A Python number as C writes it, fp32 next to fp32."""
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, (int, float)):
        raise NotLowered(f"{value!r} is not a number")
    if kind == INT and isinstance(value, int):
        return f"((int32_t){value & 0xFFFFFFFF}u)"
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if math.isnan(rounded) or math.isinf(rounded):
        return "NAN" if math.isnan(rounded) else "INFINITY" if rounded > 0 else "(-INFINITY)"
    return f"({rounded.hex()}f)"


def _infix(sign: str) -> Callable[..., str]:
    return lambda kind, wide, a, b: f"({wide})({a}) {sign} ({wide})({b})"


def _divide(kind: str, wide: str, a: str, b: str) -> str:
    return f"(float)({a}) / (float)({b})"


def _divide_number(kind: str, wide: str, number: str, x: str) -> str:
    """``1 / x * number``: so torch divides a Python number by a tensor, rounding twice."""
    return f"1.0f / (float)({x}) * {number}"


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
    if dtype == torch.int64:
        raise NotLowered("to: there is no int64 in C")
    return f"({x}) != 0" if kind == BOOL else f"({kind})({x})"


def _reinterpret(kind: str, wide: str, x: str, /, dtype: torch.dtype) -> str:
    if kind == BOOL or not isinstance(dtype, torch.dtype):
        raise NotLowered("view: only between float32 and int32")
    return x if kind == wide else f"bits_of({x})" if kind == INT else f"float_of({x})"


def _pow(kind: str, wide: str, x: str, exponent: str) -> str:
    if exponent not in (_literal(2, INT), _literal(2, FLOAT)):
        raise NotLowered("pow: only squares have a C form")
    return f"({kind})({x}) * ({kind})({x})"


_FORMS: dict[str, Callable[..., str]] = {
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
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
    "gt": _infix(">"),
    "ge": _infix(">="),
    "lt": _infix("<"),
    "le": _infix("<="),
    "eq": _infix("=="),
    "ne": _infix("!="),
    "and": _infix("&"),
    "or": _infix("|"),
    "xor": _infix("^"),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_not": lambda kind, wide, x: f"!{x}",
    "invert": lambda kind, wide, x: f"!{x}" if kind == BOOL else f"~{x}",
    "rshift": lambda kind, wide, a, b: f"shifted_right({a}, {b})",
    "lshift": lambda kind, wide, a, b: f"shifted_left({a}, {b})",
}
"""C forms by the operation's name, from ``(result type, type of the operands, operands ...)``."""
