"""Translation of element-wise torch functions into another language.

A quantiser's functions are recorded with ``torch.fx``. Every operation becomes one statement: in C, for the host path
(``toolkit/host/c_forms.py``), and in Triton, for the kernels (``toolkit/kernels/triton_forms.py``). The types are the
same as in torch: fp32, int32 or bool. Every operation rounds once, as in torch, so the results have the same bits.

Python numbers are an exception. Where torch makes int64 of them, as in ``torch.where(x > 0, 1, 2)``, the statements
compute in int32, and the values must fit. Where torch makes numbers of its default dtype of them, whichever that is,
the statements compute in fp32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

FLOAT, INT, BOOL = "float", "int32_t", "bool_t"
_SAMPLES = {
    kind: torch.ones(1, dtype=dtype, device="cpu")
    for kind, dtype in ((FLOAT, torch.float32), (INT, torch.int32), (BOOL, torch.bool))
}
_TYPES = {torch.float32: FLOAT, torch.int32: INT, torch.int64: INT, torch.bool: BOOL}

_DIVISIONS = ("truediv", "div")

OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
"""The operators that all languages write in the same way, by operation."""


class NotLowered(TypeError):
    """A function contains an operation that has no form in the other language."""


class Operand(str):
    """The text of an operand. ``kind`` is the type of a variable, or ``None`` for a number."""

    kind: str | None

    def __new__(cls, text: str, kind: str | None) -> Operand:
        operand = super().__new__(cls, text)
        operand.kind = kind
        return operand


class CodesAsNumbers:
    """Codes, in the recording of a function that uses nothing of them but a number, some of their lowest bits less a
    ``zero``, and their highest bit as a sign.

    Whoever decodes packed codes can make these at once, without the codes. Anything else that a function does with
    codes raises a TypeError.

    Args:
        bits: bits of a code.
        number: the recorder of the numbers, fp32.
        sign: the recorder of the signs, int32 with the highest bit of the code as highest bit, and zeros.

    Attributes:
        used: the bits of which the number is made, and its zero; ``None`` before it has been used.
        is_signed: whether the sign has been used.
    """

    def __init__(self, bits: int, number: Any, sign: Any) -> None:
        self._bits, self._number, self._sign = bits, number, sign
        self.used: tuple[int, int] | None = None
        self.is_signed = False

    def less(self, zero: int) -> Any:
        """The recorder of the numbers of all bits, less ``zero``."""
        return self._use(2**self._bits - 1, zero)

    def float(self) -> Any:
        """The recorder of the numbers, as :meth:`torch.Tensor.float` converts codes."""
        return self.less(0)

    def __and__(self, mask: int) -> _SomeBits:
        return _SomeBits(self, mask)

    def _use(self, mask: int, zero: int) -> Any:
        if self.used not in (None, (mask, zero)) or (mask & (mask + 1)):
            raise TypeError("codes are used as two numbers, or without some of their lower bits")
        self.used = mask, zero
        return self._number

    def _use_sign(self, mask: int, shift: int) -> Any:
        if mask != 2 ** (self._bits - 1) or shift != 32 - self._bits:
            raise TypeError("bits of codes are shifted that are no sign")
        self.is_signed = True
        return self._sign

    def __eq__(self, other: object) -> bool:
        raise TypeError("codes are compared")

    def __ne__(self, other: object) -> bool:
        raise TypeError("codes are compared")

    def __bool__(self) -> bool:
        raise TypeError("codes are a condition")

    __hash__ = None  # type: ignore[assignment]


class _SomeBits(CodesAsNumbers):
    """The bits of codes that a mask leaves."""

    def __init__(self, codes: CodesAsNumbers, mask: int) -> None:
        self._codes, self._mask = codes, mask

    def less(self, zero: int) -> Any:
        return self._codes._use(self._mask, zero)

    def __lshift__(self, shift: int) -> Any:
        return self._codes._use_sign(self._mask, shift)


@dataclass(frozen=True)
class Language:
    """A language into which functions are translated.

    Attributes:
        name: the language's name in messages.
        forms: functions that write an operation, by the name of the operation: ``(result type, type of the operands,
            operands ...)`` to an expression. The operands are each an :class:`Operand`.
        literal: a function that writes a Python number: ``(number, type)`` to an expression.
    """

    name: str
    forms: dict[str, Callable[..., str]]
    literal: Callable[[Any, str], str]


Statement = tuple[str, str, str]
"""A variable, its type, and the expression of its value."""
Values = dict[fx.Node, tuple[Operand, torch.Tensor]]  # the variable of a node, and a sample of its value


def record(
    function: Callable[..., Any], inputs: Sequence[Any], language: Language
) -> tuple[list[Statement], list[Operand]]:
    """The statements of ``function`` in a language, and its results, which are variables or numbers.

    Args:
        function: called with one recorder for every name in ``inputs``.
        inputs: names of variables, which are fp32 unless given as ``(name, type)``. A list is passed as a tuple of
            recorders. Anything else is passed unchanged.
        language: the language of the expressions.

    Raises:
        NotLowered: the message names the operation, or the error of the recording. Errors in a function itself are
            reported by the reference, which runs it in torch.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    env: Values = {}

    def recorder(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(recorder(each) for each in value)
        if not isinstance(value, (str, tuple)):
            return value
        name, kind = (value, FLOAT) if isinstance(value, str) else value
        node = graph.placeholder(name)
        env[node] = Operand(name, kind), _SAMPLES[kind]
        return fx.Proxy(node, tracer)

    try:
        results = function(*(recorder(value) for value in inputs))
    except fx.proxy.TraceError as error:
        raise NotLowered(f"what it does depends on the values: {error}") from error
    except Exception as error:
        raise NotLowered(f"the function cannot be recorded: {type(error).__name__}: {error}") from error
    results = results if isinstance(results, (tuple, list)) else (results,)
    statements: dict[fx.Node, Statement] = {}
    for node in graph.nodes:  # also operations that no result needs: they might work in place
        if node.op != "placeholder":
            statements[node] = _statement(node, env, len(statements), language)
    needed = {result.node for result in results if isinstance(result, fx.Proxy)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    lines = [statement for node, statement in statements.items() if node in needed]
    found = [
        env[result.node][0] if isinstance(result, fx.Proxy) else Operand(language.literal(result, FLOAT), None)
        for result in results
    ]
    return lines, found


def _statement(node: fx.Node, env: Values, number: int, language: Language) -> Statement:
    """The statement of a node. Its variable is put into ``env``, with a sample of its value."""
    if node.op not in ("call_function", "call_method"):
        raise NotLowered(f"{node.op} {node.target}")
    name = str(node.target) if node.op == "call_method" else node.target.__name__  # type: ignore[union-attr]
    plain = _plain(name, node)
    form = language.forms.get(plain)
    if form is None:
        raise NotLowered(f"{name} has no {language.name} form; there are {', '.join(sorted(language.forms))}")
    samples = [fx.node.map_arg(given, lambda each: env[each][1]) for given in (node.args, node.kwargs)]
    function = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
    try:
        sample = function(*samples[0], **samples[1])  # type: ignore[operator, arg-type]
    except Exception as error:
        raise NotLowered(f"{name} fails: {error}") from error
    if getattr(sample, "dtype", None) == torch.get_default_dtype():
        sample = sample.to(torch.float32)
    kind = _TYPES.get(getattr(sample, "dtype", None))  # type: ignore[arg-type]
    if kind is None or sample.shape != (1,):
        raise NotLowered(f"{name} gives something else than one float32, int32 or bool for every element")
    given = (*node.args, *node.kwargs.values())
    dtypes = [env[each][1].dtype for each in given if isinstance(each, fx.Node)]
    wide = FLOAT if torch.float32 in dtypes or any(isinstance(each, float) for each in given) else INT
    if plain in _DIVISIONS:
        wide = FLOAT
    if torch.int64 in (*dtypes, sample.dtype) and any(isinstance(each, int) and _overflows(each) for each in given):
        raise NotLowered(f"{name}: a number does not fit int32")

    def operand(value: Any) -> Any:
        if value is None or isinstance(value, torch.dtype):
            return value
        return env[value][0] if isinstance(value, fx.Node) else Operand(language.literal(value, wide), None)

    variable = f"t_{node.name}_{number}"
    try:
        value = form(kind, wide, *map(operand, node.args), **{key: operand(each) for key, each in node.kwargs.items()})
    except NotLowered:
        raise
    except TypeError as error:
        raise NotLowered(f"{name} has no {language.name} form with these arguments: {error}") from error
    env[node] = Operand(variable, kind), sample
    return variable, kind, value


def _plain(name: str, node: fx.Node) -> str:
    """The name of an operation: ``and`` for ``operator.and_`` and ``__and__``, but ``add_`` for ``add_`` (in place)."""
    if name.startswith("__") or getattr(node.target, "__module__", None) == "_operator":
        return name.strip("_")
    return name


def _overflows(value: int) -> bool:
    return not -(2**31) <= value < 2**31


def rounded_to_fp32(value: float) -> float:
    """The nearest fp32 number, or infinity for a number that is too large."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
