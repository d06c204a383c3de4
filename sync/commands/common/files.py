"""Files of the command: all that is written appears at once and whole, and only if nothing is refused."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .console import is_first_rank
from .outcome import CommandError, bad_data, wrong_use

STANDARD = "-"


def source(path: str) -> str:
    """The path that a reader opens: ``-`` stands for stdin."""
    return "/dev/stdin" if path == STANDARD else path


def check_writable(path: str | None) -> None:
    """Refuse a path that cannot be written, before anything is computed. Nothing is changed.

    Raises:
        CommandError: the path is a folder, or its folder does not exist or cannot be written.
    """
    if path is None or path == STANDARD:
        return
    if os.path.isdir(path):
        raise wrong_use(f"{path}: is a folder", "name a file")
    folder = Path(path).parent
    if not folder.is_dir():
        raise wrong_use(f"{path}: there is no folder {folder}", f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        raise wrong_use(f"{path}: the folder {folder} cannot be written", "name a file elsewhere")


def check_outputs(outputs: Sequence[str], inputs: Sequence[str]) -> None:
    """Refuse paths that cannot be written, or that name one file twice, before anything is computed.

    Args:
        outputs: the files to write.
        inputs: the files to read, by path or by name.

    Raises:
        CommandError: one of :func:`check_writable`, or an output is another output or an input.
    """
    for at, path in enumerate(outputs):
        check_writable(path)
        if any(_is_same(path, other) for other in outputs[:at]):
            raise wrong_use(f"{path}: two results cannot be written to one file", "name another file")
        if path != STANDARD and any(_is_same(path, other) for other in inputs):
            raise wrong_use(f"{path}: would replace a file that is read", "name another file")


def _is_same(path: str, other: str) -> bool:
    try:
        return path == other or os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def write(path: str, content: str | bytes) -> None:
    """Write a file as a whole: whoever reads the path sees the old content or the new one.

    Ranks other than 0 write nothing.

    Args:
        path: the file; ``-`` is stdout.
        content: its content.

    Raises:
        CommandError: it cannot be written.
    """
    if not is_first_rank():
        return
    data = content.encode() if isinstance(content, str) else content
    if path == STANDARD:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    check_writable(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, such as /dev/null
        Path(path).write_bytes(data)
        return
    target = Path(path).resolve()  # a link stays a link
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise wrong_use(f"{path}: cannot be written: {error.strerror}", "name a file elsewhere") from None


@contextmanager
def reading(path: str, remedy: str) -> Iterator[None]:
    """A context in which a file is read: its errors name the file and the command that makes a good one.

    Args:
        path: the file as the user has named it.
        remedy: the command.

    Raises:
        CommandError: the file cannot be opened (a wrong use), or its content is not valid (bad data).
    """
    named = "stdin" if path == STANDARD else path
    try:
        yield
    except CommandError:
        raise
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise wrong_use(f"{named}: {reason}", remedy) from None
    except ValueError as error:  # damaged JSON and text are ValueErrors, too
        message = str(error) if named in str(error) else f"{named}: {error}"
        refuse = wrong_use if isinstance(error.__cause__, OSError) else bad_data
        raise refuse(message, remedy) from None
    except RecursionError:
        raise bad_data(f"{named}: nested too deeply", remedy) from None
