"""Files of traces: reading of recorded, published and shipped ones, and writing.

Whatever is wrong with a file, the error is a :class:`~gckernels.sync.traces.model_trace.TraceError` that says what to
do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path

from ..plans.json_files import MAX_NBYTES, Entry, parsed, shown
from .model_trace import Trace, TraceError
from .published_traces import from_published, is_published
from .trace_records import from_record, to_record

_REMEDY = "write the trace again, with 'gckernels trace SCRIPT -o FILE'"
_SHIPPED = "shipped"


def read_trace(path_or_name: str | os.PathLike[str]) -> Trace:
    """The trace in a file, or a shipped one.

    Args:
        path_or_name: the path of a file that :func:`write_trace` has written or that has the published form; a name
            of :func:`~gckernels.sync.traces.trace_files.trace_names`, unless there is a file of that name; or ``-``
            for the standard input.

    Raises:
        TraceError: there is no such file or name, or the trace is damaged, cut off, of another version, or not valid.
    """
    if not isinstance(path_or_name, str | os.PathLike):
        raise TraceError(f"read_trace: expected a path or a name, got {type(path_or_name).__name__}")
    path = os.fspath(path_or_name)
    if path == "-":
        return trace_from_text(sys.stdin.buffer.read(MAX_NBYTES + 1), "standard input")
    if isinstance(path, str) and path in trace_names() and not os.path.exists(path):
        return trace_from_text(_shipped()[path].read_bytes(), path)
    try:
        with open(path, "rb") as file:
            return trace_from_text(file.read(MAX_NBYTES + 1), os.fsdecode(path))
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        names = ", ".join(trace_names()) or "none"
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(
            f"{path!r}: no trace can be read: {reason}; give the path of a trace or the name of a shipped one ({names})"
        ) from error


def trace_from_text(text: str | bytes, file: str) -> Trace:
    """The trace in the text of a file.

    Args:
        text: the text; bytes are UTF-8.
        file: the name of the file, for errors.

    Raises:
        TraceError: the trace is not valid.
    """
    if len(text) > MAX_NBYTES:
        raise TraceError(f"{file}: more than {MAX_NBYTES >> 20} MiB, no trace is as large; {_REMEDY}")
    document = parsed(text, file, TraceError, _REMEDY)
    return from_published(document) if is_published(document) else from_record(document)


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file, as JSON. The file is replaced as a whole, or not at all.

    Args:
        trace: the trace.
        path: the file.

    Raises:
        TraceError: the trace is not valid, or the file cannot be written.
    """
    text = trace_to_text(trace)
    path = Path(path)
    part = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            part = file.name
            file.write(text)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:
        if part is not None and os.path.exists(part):
            os.unlink(part)
        raise TraceError(f"{path}: the trace cannot be written: {error.strerror}; give another path") from error


def trace_to_text(trace: Trace) -> str:
    """The text of the trace's file.

    Raises:
        TraceError: the trace is not valid.
    """
    if not isinstance(trace, Trace):
        raise TraceError(f"write_trace: expected a Trace, got {type(trace).__name__}")
    where = f"the trace of {shown(trace.model)}"
    try:
        record = to_record(trace)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"{where}: it has values of wrong types: {error}; make it of the types that Trace says"
        ) from error
    from_record(Entry(record, where, TraceError, "correct the trace"))
    tensors = record.pop("tensors")
    head = json.dumps(record, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "tensors": [\n  ' + ",\n  ".join(map(json.dumps, tensors)) + "\n ]\n}\n"


def trace_names() -> tuple[str, ...]:
    """The names of the traces that are part of the package, sorted."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, resources.abc.Traversable]:
    folder = resources.files(__package__).joinpath(_SHIPPED)
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name.removesuffix(".json"): file for file in files if file.name.endswith(".json")}
