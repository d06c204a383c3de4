"""The C compiler of the host path: finding it, and its options."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=default", "-fwrapv", "-fno-strict-aliasing"),
    # These come behind the options in CC and override them, so that results are the reference's whatever CC is set to
    # for other programs. The start files of -ffast-math make the processor flush subnormal numbers to zero in the whole
    # process; a library without constructors needs no start files.
    *("-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-finite-math-only", "-fno-associative-math"),
    *("-fno-reciprocal-math", "-fsigned-zeros", "-nostartfiles"),
    # The first one makes every operation round by itself, as the reference does. The other two let loops be vectorised
    # and change no result.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_NATIVE = ("-march=native",)
_WIDE = ("-mprefer-vector-width=512",)
# gcc's partial redundancy elimination turns a conditional sum into a branch, and its jump threading turns two limits
# into four: it does not vectorise such loops, or vectorises them badly
_FOR_GCC = ("-fno-tree-pre", "-fno-thread-jumps")
TUNINGS = ((*_NATIVE, *_WIDE, *_FOR_GCC), (*_NATIVE, *_WIDE), (*_NATIVE, *_FOR_GCC), _NATIVE, ())
"""Further sets of options, the best one first. Not every compiler knows gcc's passes, every processor, or the option
for the width of vectors, which gcc halves by default and has on x86 alone."""


class CompilerFailed(Exception):
    """The compiler failed; the message is the command and its output."""


@functools.cache
def compiler() -> tuple[str, ...] | None:
    """The command of a C compiler, or ``None`` without one.

    The first of these that exists: ``$CC``, ``cc``, ``gcc``, ``clang``, the compiler of the package ``ziglang``.
    """
    for command in (_chosen(), ["cc"], ["gcc"], ["clang"], _packaged()):
        path = shutil.which(command[0]) if command else None
        if path:
            return (os.path.abspath(path), *command[1:])
    return None


def _chosen() -> list[str]:
    """The words of ``$CC``; none, after a warning, if they are not a command."""
    text = os.environ.get("CC", "")
    try:
        words = shlex.split(text)
        why = f"there is no command {words[0]!r}" if words and shutil.which(words[0]) is None else ""
    except ValueError as error:
        why = str(error)
    if why:
        warnings.warn(f"gckernels: CC={text!r} is not used to compile the CPU path: {why}", stacklevel=2)
        return []
    return words


def _packaged() -> list[str]:
    """The command of the compiler that the extra ``gckernels[compiler]`` installs; empty without it.

    The package is not imported.
    """
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        return []
    return [str(Path(package.origin).with_name("zig")), "cc"]


def dependencies(command: tuple[str, ...]) -> tuple[str, ...]:
    """Everything that a library depends on besides its source: compiler, options, processor, C library."""
    return (*command, *FLAGS, *TUNINGS[0], _processor(), *platform.libc_ver())


@functools.cache
def _processor() -> str:
    """The processor's model and features, on which ``-march=native`` depends; machines of different kinds may share a
    cache."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    return f"{platform.machine()} {platform.processor()} {described(text)}"


_DESCRIPTIONS = re.compile(
    r"^(flags|features|isa|uarch|vendor_id|platform|machine|(?:cpu )?model(?: name)?"
    r"|cpu(?: family| implementer| architecture| variant| part)?|processor 0)\s*:(.*)",
    re.IGNORECASE | re.MULTILINE,
)


def described(text: str) -> dict[str, str]:
    """The lines of ``/proc/cpuinfo`` in which kinds of processors differ, by their names; the first of each name. Which
    there are depends on the kind of machine; other lines differ from core to core, or change."""
    return {name: value.strip() for name, value in reversed(_DESCRIPTIONS.findall(text))}


def compile_library(command: tuple[str, ...], source: str, folder: Path) -> Path:
    """Compile a C program in ``folder`` and return the path of the shared library.

    Nothing is written elsewhere, where a file system may be full or read-only. The exception is zig's own cache, which
    all programs share, beside ``folder``.

    Raises:
        CompilerFailed: it cannot be compiled.
        OSError: ``folder`` cannot be written to.
    """
    (folder / "host.c").write_text(source)
    environment = {"ZIG_GLOBAL_CACHE_DIR": "../zig"} | os.environ | {"TMPDIR": ".", "ZIG_LOCAL_CACHE_DIR": "."}
    for tuning in TUNINGS:
        line = [*command, *FLAGS, *tuning, "host.c", "-o", "host.so", "-lm"]
        result = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if result.returncode == 0:
            return folder / "host.so"
    output = result.stderr[:1000].strip() or f"exit status {result.returncode}"
    raise CompilerFailed(f"{shlex.join(line)}: {output}")
