"""Shared libraries, compiled from C at run time with the machine's compiler, and kept.

The host path is compiled where it runs, as Triton's kernels are: for this processor, with this quantiser's constants. A
library is compiled once and kept under ``GCKERNELS_CACHE`` (by default ``~/.cache/gckernels``); its key is made of its
source, the compiler and the processor. Without a compiler, or with one that fails, :func:`library` returns ``None``
after one warning, and callers run their reference instead: slower, and the same but for the order of sums.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch

from . import cache
from .cache import ProgramCache
from .compilers import CompilerFailed, compile_library, compiler, dependencies
from .sources import program_text

COMMON = program_text(__package__, "common.c")
"""The C text that every program begins with."""
VECTORS = program_text(__package__, "vectors.c")
"""The C text behind it in programs that compact values or draw random words."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The codes of the types of gradients and outputs in C."""

TILE = 1024
"""Elements in a tile, which a program works on at a time (or one block): its arrays fit the first-level cache."""
PART = 64
"""Smallest number of tiles that is worth another thread."""


@functools.cache
def library(source: str) -> ctypes.CDLL | None:
    """The shared library of a C program, compiled at most once; ``None``, after a warning, if that is impossible."""
    command = compiler()
    if command is None:
        warn_once("there is no C compiler (install gcc or clang, or gckernels[compiler], or set CC)")
        return None
    key = cache.digest("\0".join((source, *dependencies(command))).encode())
    where = "a temporary folder"
    try:
        with cache.opened() as kept:
            where = kept.path
            return _found(kept, key) or kept.load(_compiled(kept, key, command, source))
    except CompilerFailed as error:
        warn_once(f"the C compiler fails: {error}")
    except OSError as error:  # a full disk, a file system from which nothing may be run
        warn_once(f"its compiled programs cannot be kept or loaded: {error.strerror or error} ({where})")
    return None


def _found(kept: ProgramCache, key: str) -> ctypes.CDLL | None:
    """The library that is kept under ``key``. One that cannot be loaded is removed, and ``None`` returned: the machine
    that compiled it may have other system libraries."""
    name = kept.find(key)
    if name is None:
        return None
    try:
        return kept.load(name)
    except OSError:
        if not kept.may_run():
            raise
        kept.remove(name)
        return None


def _compiled(kept: ProgramCache, key: str, command: tuple[str, ...], source: str) -> str:
    """Compile a library that was not found, unless another process does so meanwhile, and return its name."""
    with kept.alone(key):
        found = kept.find(key)
        if found is None:
            with kept.scratch() as folder:
                found = kept.keep(key, compile_library(command, source, folder))
        return found


def declare(built: ctypes.CDLL | None, *names: str) -> Any:
    """``built``, with those of the functions ``name(call, start, stop)`` declared that it has. They work on tiles
    ``start`` to ``stop``."""
    for name in names:
        if hasattr(built, name):
            function = getattr(built, name)
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), None
    return built


def defined(**constants: object) -> str:
    """The C text that defines the constants."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items())


@functools.cache
def warn_once(why: str) -> None:
    """Warn that the host path is slow, once for each reason."""
    warnings.warn(
        f"gckernels: the CPU path runs in eager torch, most of it 20 to 150 times slower, because {why}", stacklevel=2
    )
