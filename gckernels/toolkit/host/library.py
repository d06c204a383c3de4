"""Compiling C at run time, with the compiler that is there, and keeping what came out.

The host path is compiled where it runs, as Triton's kernels are: for this very processor, with this quantiser's
constants. A library is compiled once and kept under ``GCKERNELS_CACHE`` (by default ``~/.cache/gckernels``), by the
text of its source, the compiler and the processor. Without a compiler, or with one that fails, :func:`library` returns
``None``, says so once, and callers run their reference instead: slower, the same result.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

import torch

from . import cache
from .cache import ProgramCache
from .compilers import CompilerFailed, compile_library, compiler, dependencies

COMMON = Path(__file__).with_name("common.c").read_text()
"""What every program begins with."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Its codes for the types of gradients and outputs."""

TILE = 1024
"""Elements that a program works on at once (or one block): a tile's arrays fit the first-level cache together."""
PART = 64
"""Tiles: less is not worth another thread."""


@functools.cache
def library(source: str) -> ctypes.CDLL | None:
    """The shared library of this C program, compiled at most once; ``None``, after a warning, if that is impossible."""
    command = compiler()
    if command is None:
        warn_once("there is no C compiler (install gcc or clang, or gckernels[compiler], or set CC)")
        return None
    key = cache.digest("\0".join((source, *dependencies(command))).encode())
    where = "a temporary folder"
    try:
        with cache.opened() as kept:
            where = kept.path
            return kept.load(kept.find(key) or _compiled(kept, key, command, source))
    except CompilerFailed as error:
        warn_once(f"the C compiler fails: {error}")
    except OSError as error:  # a full disk, a file system from which nothing may be run
        warn_once(f"its compiled programs cannot be kept or loaded: {error.strerror or error} ({where})")
    return None


def _compiled(kept: ProgramCache, key: str, command: tuple[str, ...], source: str) -> str:
    """The name of a library that is not there yet, compiled by this process or, meanwhile, by another one."""
    with kept.alone(key):
        found = kept.find(key)
        if found is None:
            with kept.scratch() as folder:
                found = kept.keep(key, compile_library(command, source, folder))
        return found


def declare(built: ctypes.CDLL, *names: str) -> None:
    """Declare the functions ``name(call, start, stop)``, which do the tiles from ``start`` on, that ``built`` has."""
    for name in names:
        if hasattr(built, name):
            function = getattr(built, name)
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), None


@functools.cache
def warn_once(why: str) -> None:
    """Say that the host path is slow, once for each reason."""
    warnings.warn(
        f"gckernels: the CPU path runs in eager torch, most of it 20 to 150 times slower, because {why}", stacklevel=2
    )
