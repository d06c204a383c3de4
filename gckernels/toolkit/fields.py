"""Checks of compressors' fields, shared so that their error messages agree."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

_SHOWN = 60  # characters of a value in an error
_LISTED = 16  # values in a list of all that are allowed
MAX_BLOCK = 16384  # elements; a Triton program holds a whole block in registers
_SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def shown(value: object, *, quoted: bool = True) -> str:
    """The value as a short text for errors."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if quoted else str(value)
    text = text.encode("ascii", "backslashreplace").decode() if not is_printable_unicode(text) else text
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def is_printable_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: lone halves of surrogate pairs, which JSON allows, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype with a name such as ``"float16"``, ``"torch.float16"`` or ``"fp16"``; ``None`` if there is none."""
    name = name.lower().removeprefix("torch.")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def as_dtype(what: str, value: Any) -> torch.dtype:
    """``value`` as a dtype, which it is or names (see :func:`dtype_named`).

    Raises:
        ValueError: ``value`` is neither; the message calls it ``what``.
    """
    dtype = dtype_named(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{what} must be a torch dtype or the name of one, got {shown(value)}")
    return dtype


def require_in(name: str, field: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    choices = tuple(allowed)
    if not any(value == choice and type(value) is type(choice) for choice in choices):  # 4.0 and True are not integers
        texts = [str(choice) for choice in choices]
        listed = ", ".join(texts if len(texts) <= _LISTED else [*texts[:2], "...", texts[-1]])
        raise ValueError(f"{name}: {field} must be one of {listed}, got {shown(value)}")


def require_float(name: str, field: str, value: Any, smallest: float, below: float) -> None:
    """Raise ValueError unless ``value`` is a float (not an integer) in ``[smallest, below)``; NaN is refused."""
    if not isinstance(value, float) or not smallest <= value < below:
        raise ValueError(f"{name}: {field} must be a float from {smallest} to below {below}, got {shown(value)}")


def require_block(name: str, block: int | None, smallest: int, optional: bool, field: str = "block") -> None:
    """Raise ValueError unless ``block`` is a power of two from ``smallest`` to 16384 (or None, if optional)."""
    if block is None and optional:
        return
    valid = isinstance(block, int) and smallest <= block <= MAX_BLOCK and block & (block - 1) == 0
    if not valid:
        also = "None or " if optional else ""
        raise ValueError(
            f"{name}: {field} must be {also}a power of two from {smallest} to {MAX_BLOCK}, got {shown(block)}"
        )


def require_ratio(name: str, ratio: float, field: str = "ratio") -> None:
    """Raise ValueError unless ``ratio`` is a float (not an integer) in ``(0, 1]``."""
    if not isinstance(ratio, float) or not 0.0 < ratio <= 1.0:
        raise ValueError(f"{name}: {field} must be a float above 0 and at most 1, got {shown(ratio)}")
