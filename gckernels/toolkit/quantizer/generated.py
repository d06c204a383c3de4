"""The Triton functions of a quantiser, generated from its torch functions.

Each configuration has one Python module, whose text follows from the functions alone. The module is kept in the folder
of compiled programs, for people and tools to read: tracebacks and profilers refer to its lines. Where that folder
cannot be written, ``linecache`` still has the text under the same path.
"""

from __future__ import annotations

import functools
import linecache
import types
from typing import Any

from ..constants import Constants
from ..host.cache import digest, keep_source
from ..kernels.triton_forms import lower
from ..lowering import BOOL, FLOAT, INT, CodesAsNumbers, NotLowered

_NUMBERS = ("codes[0]", ("codes[1]", INT))
_NUMERIC = ("at_least", "at_most", "between", "is_finite", "nearest", "negative_zero", "shifted_left", "shifted_right")


@functools.lru_cache(maxsize=4096)
def triton_functions(quantizer: Any) -> dict[str, Any]:
    """The ``@triton.jit`` functions of a quantiser's maps and statistic, by name.

    A :class:`~gckernels.toolkit.quantizer.Dual` contributes its own Triton function, or with a ``capability`` a branch;
    all others are generated.

    Raises:
        NotLowered: a function has no Triton form, and is no ``Dual``.
    """
    functions = _functions(quantizer)
    module = _module(quantizer.op_name, triton_source(quantizer))
    return {name: each.triton if _replaces(each) else getattr(module, name) for name, each in functions.items()}


@functools.lru_cache(maxsize=4096)
def number_form(quantizer: Any) -> Constants | None:
    """The form in which the Triton function ``dequantize`` takes codes; ``None`` if it takes the codes themselves,
    because it uses other parts of them than numbers.

    It takes a tuple: numbers in fp32, made of the bits of ``mask`` less ``zero``; and if codes are ``signed``, int32
    with the highest bit of the code as highest bit, and zeros.
    """
    if hasattr(quantizer.maps.dequantize, "triton"):
        return None
    codes: list[CodesAsNumbers] = []
    stats = [f"stats[{index}]" for index in range(quantizer.num_stats)]
    try:
        lower(_of_numbers(quantizer, codes), [list(_NUMBERS), stats, quantizer.constants], FLOAT, "codes[0]")
    except NotLowered:
        return None
    if codes[0].used is None:
        return None
    mask, zero = codes[0].used
    return Constants(mask=mask, zero=zero, signed=codes[0].is_signed)


def _of_numbers(quantizer: Any, seen: list[CodesAsNumbers]) -> Any:
    """``dequantize`` of codes that are numbers; it puts the codes into ``seen``."""

    def dequantize(numbers: Any, stats: Any, constants: Any) -> Any:
        seen.append(CodesAsNumbers(quantizer.bits, *numbers))
        return quantizer.maps.dequantize(seen[-1], stats, constants)

    return dequantize


def triton_source(quantizer: Any) -> str:
    """The source of the module that holds the generated functions of a quantiser.

    Raises:
        NotLowered: a function has no Triton form, and is no ``Dual``.
    """
    functions, imports = [], []
    for name, function in _functions(quantizer).items():
        if _replaces(function):
            functions.append(f"# {name}: {function.triton.__module__}.{function.triton.__name__}\n")
            continue
        try:
            functions.append(_definition(quantizer, name, function))
            if hasattr(function, "triton"):
                imports.append("from gckernels.toolkit.target import for_nvidia\n")
                imports.append(f"from {function.triton.fn.__module__} import {function.triton.fn.__name__}\n")
        except NotLowered as error:
            raise NotLowered(f"{quantizer.name}: {name}: {error}; a Dual may have a Triton form") from error
    text = "\n\n".join(functions)
    if used := [name for name in _NUMERIC if f"{name}(" in text]:
        imports.append(f"from gckernels.toolkit.numeric import {', '.join(used)}\n")
    title = f'"""Triton functions of {quantizer!r}, generated from its torch functions."""\n'
    lines = "\n" + "".join(dict.fromkeys(imports)) if imports else ""
    return f"{title}\nimport triton\nimport triton.language as tl\n{lines}\n\n{text}"


def _replaces(function: Any) -> bool:
    """Whether a function is a ``Dual`` whose Triton function every GPU runs."""
    return hasattr(function, "triton") and function.capability is None


def _functions(quantizer: Any) -> dict[str, Any]:
    maps, statistic = quantizer.maps, quantizer.maps.statistic
    functions = {name: getattr(maps, name) for name in ("quantize", "dequantize", "accumulate", "keep", "merge")}
    if number_form(quantizer) is not None:
        functions["dequantize"] = _of_numbers(quantizer, [])
    if maps.surety:
        functions["surety"] = maps.surety
    if statistic:
        functions |= {"terms": statistic.terms, "finish": statistic.finish}
    if shortcut := quantizer.shortcut:
        quick = shortcut.statistic
        functions |= {"quick_terms": quick.terms, "quick_finish": quick.finish, "quick_holds": shortcut.holds}
    return functions


def _definition(quantizer: Any, name: str, function: Any) -> str:
    constants, statistic = quantizer.constants, quantizer.maps.statistic
    stats = [f"stats[{index}]" for index in range(quantizer.num_stats)]
    of = quantizer.shortcut.statistic if name.startswith("quick_") else statistic
    partials = [f"partials[{index}]" for index in range(len(of.kinds) if of else 0)]
    parameters: dict[str, dict[str, Any]] = {
        "quantize": {"values": "values", "stats": stats, "dither": "dither"},
        "surety": {"values": "values"},
        "dequantize": {"codes": list(_NUMBERS) if number_form(quantizer) else ("codes", INT), "stats": stats},
        "accumulate": {"grad": "grad", "residual": "residual"},
        "keep": {"values": "values", "decoded": "decoded"},
        "merge": {"total": "total", "scale": "scale"},
        "terms": {"values": "values"},
        "finish": {"partials": partials, "count": "count"},
        "holds": {"partials": partials},
    }
    role = name.removeprefix("quick_")
    given = parameters[role]
    shaped = {"finish": "count", "holds": "partials[0]"}.get(role, next(iter(given)))
    if isinstance(given.get(shaped), list):
        shaped = f"{shaped}[0]"
    kind = {"quantize": INT, "holds": BOOL}.get(role, FLOAT)
    lines, results = lower(function, [*given.values(), constants], kind, shaped)
    expected = {"terms": len(partials), "finish": len(stats)}.get(role, 1)
    if len(results) != expected:
        raise NotLowered(f"it returns {len(results)} values instead of {expected}")
    lines.append(f"return ({', '.join(results)},)" if role in ("terms", "finish") else f"return {results[0]}")
    if hasattr(function, "triton"):
        special = f"return {function.triton.fn.__name__}({', '.join(given)}, C)"
        lines = [
            f"if for_nvidia({function.capability}):",
            f"    {special}",
            "else:",
            *(f"    {line}" for line in lines),
        ]
    body = "".join(f"    {line}\n" for line in lines)
    return f"@triton.jit\ndef {name}({', '.join(given)}, C: tl.constexpr):\n{body}"


@functools.cache
def _module(name: str, text: str) -> types.ModuleType:
    identity = f"{name}_{digest(text.encode())[:16]}"
    path = keep_source(f"{identity}.py", text)
    # without a modification time, so that nothing looks for the file; Triton reads the source of its functions here
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = types.ModuleType(f"gckernels.generated.{identity}")
    module.__file__ = path
    exec(compile(text, path, "exec"), module.__dict__)
    return module
