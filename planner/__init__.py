"""Planner: predicts the time of a training step without running it, and chooses plans; the command ``gckernels``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .predictive.searching import proposer
    from .profiling.measure import profile

__all__ = [
    "profile",
    "proposer",
]


_LATER = {
    "profile": ".profiling.measure",
    "proposer": ".predictive.searching",
}
"""The modules of names, which are imported when a name is asked for."""


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
