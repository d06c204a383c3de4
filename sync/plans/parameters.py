"""Names of a model's parameters, and which of them can have a gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attributes in which torch.compile and activation checkpointing keep the module that they wrap."""


def plain_name(name: str) -> str:
    """The name of a parameter in the model as it was written, without the modules that torch.compile and activation
    checkpointing wrap around others: ``"0._orig_mod.weight"`` becomes ``"0.weight"``."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def differentiable(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.nn.Parameter]:
    """The parameters that can have a gradient, by their plain names. Frozen ones are included, integers are not.

    Raises:
        ValueError: two parameters have the same plain name.
    """
    named: dict[str, torch.nn.Parameter] = {}
    for full_name, parameter in parameters:
        name = plain_name(full_name)
        if name in named:
            raise ValueError(f"two parameters are called {name} where torch.compile is not counted: rename one of them")
        if parameter.is_floating_point() or parameter.is_complex():
            named[name] = parameter
    return named
