"""Hooks of modules that leave copies of the modules alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
