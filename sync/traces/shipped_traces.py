"""The traces that are part of the package."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

_FOLDER = "shipped"


def trace_names() -> tuple[str, ...]:
    """The names of the traces that are part of the package, sorted."""
    return tuple(sorted(shipped_traces()))


def shipped_traces() -> dict[str, Traversable]:
    """The files of these traces, by name."""
    folder = resources.files(__package__).joinpath(_FOLDER)
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name.removesuffix(".json"): file for file in files if file.name.endswith(".json")}
