"""Arguments of the methods and functions, as the ops want them: tensors, and numbers that fit.

The ops are behind torch's dispatcher, which refuses other types with an error of its own, and integers of 64 bits
without a sign. Each function returns the value for the op, or raises an error that names the argument, what was given
and what is allowed. While torch.compile traces, numbers may be symbols and are left to the ops.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

MAX_INT = 2**63 - 1


def require_tensors(name: str, **given: Any) -> None:
    """Raise TypeError unless all of them are tensors."""
    for argument, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(value).__name__}")


def as_int(name: str, argument: str, value: Any, smallest: int, largest: int = MAX_INT) -> int:
    """``value`` as an int; what converts to one without loss does, such as NumPy's integers.

    Raises:
        TypeError: not an integer, or a boolean.
        ValueError: not from ``smallest`` to ``largest``.
    """
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        return value
    number: Any = value
    if type(value) is not int:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except (TypeError, RuntimeError):  # RuntimeError: a tensor of several numbers
            number = None
        if number is None:
            raise TypeError(f"{name}: {argument} must be an integer, got {_shown(value)}")
    if not smallest <= number <= largest:
        raise ValueError(f"{name}: {argument} must be from {_limit(smallest)} to {_limit(largest)}, got {number}")
    return int(number)


def as_seed(name: str, seed: Any) -> int:
    """``seed`` as the signed 64-bit integer that has its bits; from ``-2**63`` to ``2**64 - 1``, as for
    ``torch.manual_seed``.

    Raises:
        TypeError, ValueError: as :func:`as_int`.
    """
    number = as_int(name, "seed", seed, -(2**63), 2**64 - 1)
    return number if torch.compiler.is_compiling() or number <= MAX_INT else number - 2**64


def as_size(name: str, size: Any) -> int | None:
    """``size``, ``None`` or an integer from 0 up."""
    return None if size is None else as_int(name, "size", size, 0)


def require_number(name: str, argument: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a real number, or converts to one as NumPy's do."""
    if torch.compiler.is_compiling() or type(value) is float:
        return
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: {argument} must be a number, got {_shown(value)}")


def require_bool(name: str, argument: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a boolean."""
    if not isinstance(value, bool | torch.SymBool):
        raise TypeError(f"{name}: {argument} must be True or False, got {_shown(value)}")


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """``shape`` as a tuple; an integer is the shape of a vector.

    Raises:
        TypeError: neither an integer nor a sequence of them.
        ValueError: a dimension is negative, or there are more elements than 64 bits can count.
    """
    dimensions = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    if torch.compiler.is_compiling():
        return dimensions
    try:
        numbers = tuple([as_int(name, "shape", dimension, 0) for dimension in dimensions])
    except (TypeError, ValueError) as error:
        shown = ", ".join(map(_shown, dimensions))
        raise type(error)(f"{name}: shape must be integers from 0 up, or one, got {shown}") from error
    if math.prod(numbers) > MAX_INT:
        raise ValueError(f"{name}: shape {numbers} has more than 2**63 - 1 elements")
    return numbers


def _limit(number: int) -> str:
    return {-(2**63): "-2**63", MAX_INT: "2**63 - 1", 2**64 - 1: "2**64 - 1"}.get(number, str(number))


def _shown(value: Any) -> str:
    """Numbers and text as they are written, of anything else the type: a tensor may be long, or on a device."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__
