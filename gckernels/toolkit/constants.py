"""One object for the compile-time arguments of a kernel and of the functions that it calls."""

from __future__ import annotations

import functools
from typing import Any

import torch


class Constants:
    """Values and functions that are known when a kernel is compiled, as attributes: ``C.bits``, ``Q.quantize``.

    Triton caches a compiled kernel under the text of its compile-time arguments. The text of this object therefore
    contains everything that a kernel may use: every value, and for a ``@triton.jit`` function the digest of its source
    and of all functions that it calls. Floats are rounded to fp32, so that no implementation computes with more digits
    than another.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            rounded = (
                torch.tensor(value, dtype=torch.float32, device="cpu").item() if isinstance(value, float) else value
            )
            self.__dict__[name] = rounded
        # computed once: Triton needs both in every launch
        self._text = (
            f"Constants({', '.join(f'{name}={_text(value)}' for name, value in sorted(self.__dict__.items()))})"
        )
        self._hash = hash(self._text)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{self!r} cannot be changed: kernels are cached under its text")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Constants) and self._text == other._text)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._text


def _text(value: Any) -> str:
    """The text of a value. A Triton function has a ``cache_key``; an interpreted one only has a name."""
    function = getattr(value, "fn", None)
    if function is None:
        return repr(value)
    name = f"{function.__module__}.{function.__qualname__}"
    return f"{name}:{value.cache_key}" if hasattr(value, "cache_key") else name


@functools.lru_cache(maxsize=4096, typed=True)  # every launch needs some; True is not 1
def constants(**values: Any) -> Constants:
    """:class:`Constants` with these values, made once."""
    return Constants(**values)
