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
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

COMMON = Path(__file__).with_name("host_common.c").read_text()
"""What every program begins with."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Its codes for the types of gradients and outputs."""

TILE = 1024
"""Elements that a program works on at once (or one block): a tile's arrays fit the first-level cache together."""
PART = 64
"""Tiles: less is not worth another thread."""

FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC", "-fwrapv", "-fno-strict-aliasing"),
    # as the reference rounds: every operation by itself. The other two let loops be vectorised and change no result.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # gcc's partial redundancy elimination turns a conditional sum into a branch, and its jump threading two limits into
    # four: such loops are not vectorised, or badly
    *("-fno-tree-pre", "-fno-thread-jumps"),
)
_FOR_PROCESSOR = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""What else, the best first: not every compiler knows every processor, nor the width, which gcc halves by default."""


class _CompilerFailed(Exception):
    """What it said."""


@functools.cache
def library(source: str) -> ctypes.CDLL | None:
    """The shared library of this C program, compiled at most once; ``None``, after a warning, if that is impossible."""
    compiler = _compiler()
    if compiler is None:
        return None
    key = _digest("\0".join((source, *compiler, *FLAGS, *_FOR_PROCESSOR[0], _processor())).encode())
    folder = _folder()
    try:
        kept = folder and _find(folder, key)
        if kept:
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(prefix="gckernels-", dir=folder) as scratch:
            built = _compile(compiler, source, Path(scratch))
            if folder:  # whole or not at all, whoever else compiles the same
                built = built.replace(folder / f"{key}-{_digest(built.read_bytes())}.so")
            return ctypes.CDLL(str(built))
    except _CompilerFailed as error:
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
def _compiler() -> tuple[str, ...] | None:
    """The command of a C compiler: ``$CC``, or the first of the usual names."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        path = shutil.which(command[0]) if command else None
        if path:
            return (os.path.abspath(path), *command[1:])
    warn_once("there is no C compiler (set CC, or install gcc or clang)")
    return None


@functools.cache
def warn_once(why: str) -> None:
    """Say that the host path is slow, once for each reason."""
    warnings.warn(f"gckernels: the CPU path runs in eager torch, several times slower, because {why}", stacklevel=2)


@functools.cache
def _processor() -> str:
    """What ``-march=native`` depends on: caches are shared between machines that share a home directory."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {features}"


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


def _compile(compiler: tuple[str, ...], source: str, folder: Path) -> Path:
    """The library, in ``folder``, and nothing anywhere else: another file system may be full, or read-only."""
    (folder / "host.c").write_text(source)
    environment = os.environ | {"TMPDIR": str(folder)}
    for for_processor in _FOR_PROCESSOR:
        command = [*compiler, *FLAGS, *for_processor, "host.c", "-o", "host.so", "-lm"]
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if result.returncode == 0:
            return folder / "host.so"
    said = result.stderr[:1000].strip() or f"exit status {result.returncode}"
    raise _CompilerFailed(f"{shlex.join(command)}: {said}")
