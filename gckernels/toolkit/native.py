"""Compiling C at run time, with the compiler that is there, and keeping what came out.

The host path is compiled where it runs, as Triton's kernels are: for this very processor, with this quantiser's
constants. A library is compiled once and kept under ``GCKERNELS_CACHE`` (by default ``~/.cache/gckernels``), by the
text of its source, the compiler and the processor. Without a compiler, or with one that fails, :func:`library` returns
``None``, says so once, and callers run their reference instead: slower, the same result.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

import torch

from .compilers import CompilerFailed, compile_library, compiler, dependencies

COMMON = Path(__file__).with_name("host_common.c").read_text()
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
        warn_once("there is no C compiler (set CC, or install gcc or clang)")
        return None
    key = _digest("\0".join((source, *dependencies(command))).encode())
    folder = _folder()
    try:
        kept = folder and _find(folder, key)
        if kept:
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(prefix="gckernels-", dir=folder) as scratch:
            built = compile_library(command, source, Path(scratch))
            if folder:  # whole or not at all, whoever else compiles the same
                built = built.replace(folder / f"{key}-{_digest(built.read_bytes())}.so")
            return ctypes.CDLL(str(built))
    except CompilerFailed as error:
        warn_once(f"the C compiler fails: {error}")
    except OSError as error:  # a full disk, a file system from which nothing may be run
        where = folder or "a temporary folder"
        warn_once(f"its compiled programs cannot be kept or loaded: {error.strerror or error} ({where})")
    return None


def declare(built: ctypes.CDLL, *names: str) -> None:
    """Declare the functions ``name(call, start, stop)``, which do the tiles from ``start`` on, that ``built`` has."""
    for name in names:
        if hasattr(built, name):
            function = getattr(built, name)
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), None


def _find(folder: Path, key: str) -> Path | None:
    """A library that was kept under this name and is what was written: a damaged one may crash when it is loaded."""
    for path in folder.glob(f"{key}-*.so"):
        if path.stem == f"{key}-{_digest(path.read_bytes())}":
            return path
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


@functools.cache
def warn_once(why: str) -> None:
    """Say that the host path is slow, once for each reason."""
    warnings.warn(f"gckernels: the CPU path runs in eager torch, several times slower, because {why}", stacklevel=2)


@functools.cache
def _folder() -> Path | None:
    """Where libraries are kept: a folder that only this user can write to, for what lies there is run.

    ``None``, after a warning, if there is none: then every process compiles for itself.
    """
    chosen = os.environ.get("GCKERNELS_CACHE")
    try:
        if chosen:
            folder = Path(chosen).absolute()
        else:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gckernels")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"others can write to {folder}"
        elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            why = f"{folder} is not writable"
        else:
            return folder
    except (OSError, RuntimeError) as error:  # the latter: no home
        why = str(error)
    warnings.warn(f"gckernels: every process compiles the CPU path anew (set GCKERNELS_CACHE): {why}", stacklevel=2)
    return None
