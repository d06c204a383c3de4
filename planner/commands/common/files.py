"""Files of the command: all that is written appears at once and whole, and errors of reading name the file."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gckernels.sync.plans.json_files import write_whole
from gckernels.sync.traces.trace_files import trace_names

from ...machines.files import machine_names
from .outcome import bad_data, wrong_use

STANDARD = "-"
MAKE = {
    "trace": "gckernels trace SCRIPT -o FILE records a trace",
    "machine": "gckernels profile -o FILE measures a machine",
    "plan": "gckernels plan TRACE MACHINE -o FILE makes a plan",
    "script": "name a training script",
}
"""How to get a good file, by its kind."""

_OUTPUTS, _INPUTS = ("output", "png", "perfetto"), ("trace", "machine", "plan", "against", "script")
_FORMATS = {"trace": "trace", "machine": "machine", "profile": "machine", "plan": "plan"}
_HEAD = re.compile(rb'"format"\s*:\s*"gckernels[ .](\w+)"')
_HEAD_NBYTES = 4096
_ORDER = "write gckernels plan TRACE MACHINE, or gckernels explain TRACE MACHINE PLAN"


def add_outputs(parser: argparse.ArgumentParser, content: str | None = None) -> None:
    """Add ``--json``, and ``-o FILE`` for a verb that makes a file.

    Args:
        parser: the verb's parser.
        content: what the file has, such as ``"the plan"``; ``None`` if the verb makes none.
    """
    if content is not None:
        help_ = f"write {content} to this file; - is stdout, and tables go to stderr then"
        parser.add_argument("-o", "--output", metavar="FILE", help=help_)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")


def check_paths(given: argparse.Namespace) -> list[str]:
    """The files to write, by parsed arguments, after all files of these have been checked, before anything is computed.

    Raises:
        CommandError: a file cannot be written, an output is another output or an input, or two inputs are stdin.
    """
    values = ([getattr(given, name, None) for name in names] for names in (_OUTPUTS, _INPUTS))
    outputs, inputs = ([value for value in each if value is not None] for each in values)
    if inputs.count(STANDARD) > 1:
        raise wrong_use(f"only one input can be {STANDARD}, which is stdin", "name files")
    for at, path in enumerate(outputs):
        if any(_is_same(path, other) for other in outputs[:at]):
            raise wrong_use(f"{path}: two results cannot be written to one file", "name another file")
        if path == STANDARD:
            continue
        if any(_is_same(path, other) for other in inputs):
            raise wrong_use(f"{path}: would replace a file that is read", "name another file")
        folder = Path(path).parent
        if os.path.isdir(path):
            raise wrong_use(f"{path}: is a folder", "name a file")
        if not folder.is_dir():
            raise wrong_use(f"{path}: there is no folder {folder}", f"mkdir -p {folder}")
        if not os.access(folder, os.W_OK):
            raise wrong_use(f"{path}: the folder {folder} cannot be written", "name a file elsewhere")
    return outputs


def _is_same(path: str, other: str) -> bool:
    try:
        return path == other or os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def write(path: str, content: str | bytes) -> None:
    """Write a file as a whole: whoever reads the path sees the old content or the new one.

    Args:
        path: the file; ``-`` is stdout.

    Raises:
        CommandError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if path == STANDARD:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, such as /dev/null
            Path(path).write_bytes(data)
        else:
            write_whole(Path(path).resolve(), data)  # a link stays a link
    except OSError as error:
        raise wrong_use(f"{path}: cannot be written: {error.strerror}", "name a file elsewhere") from None


def source(path: str) -> str:
    """The path that a reader opens: ``-`` stands for stdin."""
    return "/dev/stdin" if path == STANDARD else path


@contextmanager
def reading(
    path: str, kind: str, errors: tuple[type[Exception], ...] = (OSError, ValueError, RecursionError)
) -> Iterator[None]:
    """A context in which a file is read, or its content is used: errors name the file and the command that makes a good
    one. If the file is of another kind, they say of which.

    Args:
        path: the file as the user has named it.
        kind: its kind, a key of :data:`MAKE`.
        errors: the errors that refuse it.

    Raises:
        CommandError: the file cannot be opened (a wrong use), or its content is not valid (bad data).
    """
    named = "stdin" if path == STANDARD else path
    try:
        yield
        return
    except errors as error:  # damaged JSON and text are ValueErrors, too
        refuse = wrong_use if isinstance(error, OSError) or isinstance(error.__cause__, OSError) else bad_data
        match error:
            case FileNotFoundError():
                reason = "there is no such file"
            case OSError():
                reason = error.strerror or str(error)
            case RecursionError():
                reason = "nested too deeply"
            case _:
                reason = str(error)
        message = reason if named in reason else f"{named}: {reason}"
    found = kind_of(path)
    if found not in (None, kind):
        raise refuse(f"{path}: is a {found}, and a {kind} is expected here", _ORDER)
    raise refuse(message, MAKE[kind])


def kind_of(path: str) -> str | None:
    """The kind of a file, or of what is shipped with a name, by its head; ``None`` if that is unknown."""
    for kind, names in (("trace", trace_names()), ("machine", machine_names())):
        if path in names:
            return kind
    if path != STANDARD:
        with suppress(OSError, ValueError), open(path, "rb") as file:
            if found := _HEAD.search(file.read(_HEAD_NBYTES)):
                return _FORMATS.get(found[1].decode())
    return None
