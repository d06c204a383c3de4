"""Planner: predicts the time of a training step without running it, and chooses plans; the command ``gckernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .predictive.searching import proposer
    from .profiling.measure import profile

__all__ = [
    "profile",
    "proposer",
]


def __getattr__(name: str) -> object:
    """A name that is imported when it is asked for."""
    match name:
        case "profile":
            from .profiling.measure import profile

            return profile
        case "proposer":
            from .predictive.searching import proposer

            return proposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
