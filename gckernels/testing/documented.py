"""The statements of compressors' docstrings that can be computed with: sizes, worked examples, sources.

The module of a compressor states these in a fixed form, once. Tests check them, and ``make tables`` prints them. A
docstring contains, for example::

    Karimireddy et al., "Error Feedback Fixes SignSGD ...", ICML 2019 (arXiv:1901.09847)

    Size in bytes: ``16 + field(4 * blocks) + field(n / 8)``.

    Example: ``EFSignSGD()``, ``p = [3, -1, 0, -4]``, one block. ...::

        bytes  0..15  47 4B 43 31 00 .. 00      status word
        bytes 16..31  00 00 00 40 00 .. 00      2.0
        bytes 32..47  05 00 .. 00               bits
        decoded [2, -2, 2, -2], residual [1, 1, -2, -2]

The source has the authors, the title if there is one, and the venue or the number on arXiv. The size is an expression
of

- ``n``, the number of elements, and the fields of the configuration;
- ``blocks``, blocks of ``block`` elements, 1 where that is ``None``;
- ``k``, entries for which a sparsifier has room, and ``low``, the low bits of its indices;
- ``ceil``, ``log2``, ``max``, and ``field(nbytes)``, the next multiple of 16.

A class without a size has that of its base class. In an example, ``..`` stands for zeros up to the end of the line's
range, and comments follow three spaces. ``residual [...]`` may be left out. A compressor has one example or more.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from ..codec import Codec
from ..compressor import Compressor, from_spec


@dataclass(frozen=True)
class Example:
    """An example worked out by hand: at most 16 values, and the bytes and values they become.

    Attributes:
        compressor: the configuration.
        values: what is encoded, with a residual of zeros.
        payload: the bytes of the payload.
        decoded: what the payload decodes to.
        residual: the residual after encoding, with all states; ``None`` where the docstring does not give it.
    """

    compressor: Codec
    values: tuple[float, ...]
    payload: bytes
    decoded: tuple[float, ...]
    residual: tuple[float, ...] | None


def docstring(cls: type) -> str:
    """The docstring of the module of ``cls``; empty where there is none."""
    return inspect.getdoc(sys.modules[cls.__module__]) or ""


# -------------------------------------------------------------------- sizes

_SIZE = re.compile(r"Size in bytes: ``(.*?)``", re.DOTALL)


def size_formula(cls: type[Compressor]) -> str | None:
    """The expression for the size of a payload, from the module of the class or of its nearest base class."""
    for base in cls.__mro__:
        stated = _SIZE.search(docstring(base)) if base is not Codec else None
        if stated:
            return " ".join(stated[1].split())
    return None


def stated_nbytes(compressor: Codec, numel: int) -> int:
    """The size in bytes of the payload of ``numel`` elements, as the docstring states it.

    Raises:
        ValueError: the docstring does not state a size.
    """
    formula = size_formula(type(compressor))
    if formula is None:
        raise ValueError(f"{compressor.name}: its docstring has no line 'Size in bytes: ``...``'")
    names: dict[str, Any] = {field.name: getattr(compressor, field.name) for field in fields(compressor)}
    block = names.get("block", getattr(compressor, "block", None))
    names |= {"n": numel, "blocks": 1 if block is None else -(-numel // block)}
    names |= {
        "ceil": math.ceil,
        "log2": math.log2,
        "max": max,
        "field": lambda nbytes: -(-math.ceil(nbytes) // 16) * 16,
    }
    if "ratio" in names:
        ratio = Fraction(str(names["ratio"]))
        names["k"] = math.ceil(numel * ratio)
        names["low"] = min(range(12), key=lambda bits: ratio * (bits + 1) + Fraction(1, 2**bits))
    return int(eval(formula, {"__builtins__": {}}, names))  # an expression of this package's own files


# -------------------------------------------------------------------- examples

_EXAMPLE = re.compile(
    r"^Example: ``(\w+\(.*?\))``.*?``\w+ = (\[.*?\])``.*?::\n\n(.*?)(?=\n\S|\Z)", re.DOTALL | re.MULTILINE
)
_BYTES = re.compile(r"^bytes +(\d+)\.\.(\d+)  ((?:[0-9A-F]{2} |\.\. )*[0-9A-F]{2})(?:   .*)?$")
_LAST = re.compile(r"^decoded (\[.*?\])(?:, residual .*?(\[.*\]))?$")


def examples(cls: type[Codec]) -> list[Example]:
    """The worked examples of a compressor.

    Raises:
        ValueError: a line of an example has another form.
    """
    found = []
    for spec, values, block in _EXAMPLE.findall(docstring(cls)):
        *rows, last = [line.strip() for line in block.strip().splitlines()]
        stated = _LAST.match(last)
        if stated is None:
            raise ValueError(f"{cls.__name__}: its example must end with 'decoded [...]', got {last!r}")
        payload = b"".join(_row(cls.__name__, row) for row in rows)
        residual = _numbers(stated[2]) if stated[2] else None
        compressor = from_spec(spec)
        assert isinstance(compressor, Codec)
        found.append(Example(compressor, _numbers(values), payload, _numbers(stated[1]), residual))
    return found


def _row(name: str, line: str) -> bytes:
    stated = _BYTES.match(line)
    if stated is None:
        raise ValueError(f"{name}: a line of its example must be 'bytes FIRST..LAST  HEXADECIMAL', got {line!r}")
    nbytes = int(stated[2]) - int(stated[1]) + 1
    before, dots, after = stated[3].partition("..")
    head, tail = bytes.fromhex(before), bytes.fromhex(after)
    row = head + bytes(max(0, nbytes - len(head) - len(tail)) if dots else 0) + tail
    if len(row) != nbytes:
        raise ValueError(f"{name}: a line of its example must have {nbytes} bytes, got {line!r}")
    return row


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(eval(number, {"__builtins__": {}})) for number in text.strip("[]").split(","))


# -------------------------------------------------------------------- sources

_SOURCE = re.compile(
    r"""([A-Z]\w+(?:\ et\ al\.|\ &\ [A-Z][a-z]+)?),?\s
    (?:"[^"]+",?\s)?
    (?:(Interspeech|ICDCS|SOSP)\ (\d{4}))?(?:NeurIPS\ \d{4}|ICML\ \d{4}|ICLR\ \d{4})?,?\ ?
    \(?(?:arXiv:(\d+\.\d+))?""",
    re.VERBOSE,
)


def sources(cls: type[Compressor]) -> list[str]:
    """The publications that the docstring names, in Markdown, in its order."""
    found = []
    for authors, venue, year, number in _SOURCE.findall(" ".join(docstring(cls).split())):
        if number:
            found.append(f"{authors}, [arXiv:{number}](https://arxiv.org/abs/{number})")
        elif venue:
            found.append(f"{authors}, {venue} {year}")
    return list(dict.fromkeys(found))
