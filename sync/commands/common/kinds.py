"""The kinds of files that the command reads, so that an error can say which one was given in place of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...planner.machines.files import machine_names
from ...traces.shipped_traces import trace_names
from .files import STANDARD, reading
from .outcome import CommandError

MAKE_TRACE = "gckernels trace SCRIPT -o FILE records a trace"
MAKE_MACHINE = "gckernels profile -o FILE measures a machine"
MAKE_PLAN = "gckernels plan TRACE MACHINE -o FILE makes a plan"
_MAKE = {"trace": MAKE_TRACE, "machine": MAKE_MACHINE, "plan": MAKE_PLAN}
_FORMATS = {"trace": "trace", "machine": "machine", "profile": "machine", "plan": "plan"}
_HEAD = re.compile(rb'"format"\s*:\s*"gckernels[ .](\w+)"')
_HEAD_NBYTES = 4096
_ORDER = "write gckernels plan TRACE MACHINE, or gckernels explain PLAN --trace TRACE --machine MACHINE"


@contextmanager
def reading_kind(path: str, kind: str) -> Iterator[None]:
    """A context in which a file of a kind is read, as :func:`~.files.reading`. If it cannot be read because it is of
    another kind, the error says of which.

    Args:
        path: the file as the user has named it.
        kind: ``"trace"``, ``"machine"`` or ``"plan"``.

    Raises:
        CommandError: the file cannot be opened, or its content is not valid.
    """
    try:
        with reading(path, _MAKE[kind]):
            yield
    except CommandError as error:
        found = kind_of(path)
        if found in (None, kind):
            raise
        raise CommandError(error.code, f"{path}: is a {found}, and a {kind} is expected here", _ORDER) from None


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
