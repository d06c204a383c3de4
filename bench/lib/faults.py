"""Errors after which a process can do nothing more on the GPU."""

from __future__ import annotations

DIED = "the worker process has died"


def is_broken(message: str) -> bool:
    """Whether ``message``, of an error, means that its process cannot use the GPU any more."""
    return "CUDA error" in message or "Triton Error [CUDA]" in message or message == DIED
