"""Switches off Python's cycle collector during a search."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which Python's collector of cycles does not run.

    A search makes many small objects, and no cycles of them. The collector would go through all objects of the process
    again and again, which takes a quarter of the time of a search.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
