"""Hooks that leave copies of a module alone, and hooks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class ModelHook:
    """A hook of a module, which is neither copied nor pickled with it, nor traced by a compiler.

    Args:
        hook: what the module calls. It returns nothing, so that no input or output is changed.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> None:
        self._hook(*arguments)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """A hook that does nothing, in a copy of a module."""

    def __call__(self, *arguments: Any) -> None:
        pass


def weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """A function that calls a bound method as long as its object exists, and returns ``None`` afterwards.

    It does not keep that alive: torch's hooks are in C++, where the garbage collector sees no cycle.
    """
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> T | None:
        return None if (bound := weak()) is None else bound(*arguments)

    call.__torch_unserializable__ = True  # type: ignore[attr-defined]  # a hook that goes to no other process
    return call
