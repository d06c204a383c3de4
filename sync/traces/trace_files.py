"""Files of traces: JSON records, traces in the form in which others have published them, and those of the package.

Version 1 of the format has everything that a :class:`~gckernels.sync.traces.model_trace.ModelTrace` has, and the
SHA-256 hash of the rest. Only traces of models of FSDP2 have gathers.

A published trace has names, sizes, and ready times in microseconds, and neither shapes nor roles nor errors. Roles are
found from names and sizes. It may have the time of everything in a step that is not backward, forward and optimizer
together.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from gckernels.toolkit.fields import shown

from ..plans.json_files import MAX_NBYTES, Entry, bytes_of, parsed, write_whole
from ..plans.json_records import checked_fields, read_fields, written
from .traced_tensors import Role, TracedTensor, TraceError

FORMAT = "gckernels trace"
VERSION = 1

_HEAD = ("format", "version")
_TIMES = ("forward_s", "backward_s", "optimizer_s")
_KEYS = ("model", "source", *_TIMES, "buckets", "copies_gradients", "gathers", "tensors")
"""The keys of the fields of a trace in the order of files."""
_PUBLISHED = ("model", "source", "order", "tensors")
_EMBEDDINGS = ("wte", "wpe")  # how GPT-2's names call its two embeddings
_FOLDER = "shipped"
_REMEDY = "write the trace again, with 'gckernels trace SCRIPT -o FILE'"


def trace_names() -> tuple[str, ...]:
    """The names of the traces that are part of the package, sorted."""
    return tuple(sorted(shipped_traces()))


def shipped_traces() -> dict[str, Traversable]:
    """The files of these traces, by name."""
    folder = resources.files(__package__).joinpath(_FOLDER)
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name.removesuffix(".json"): file for file in files if file.name.endswith(".json")}


# -------------------------------------------------------------------- writing


def save(trace: Any, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file, as :meth:`ModelTrace.save <gckernels.sync.traces.model_trace.ModelTrace.save>`."""
    text = text_of(trace)
    try:
        write_whole(path, text)
    except OSError as error:
        raise TraceError(
            f"{os.fspath(path)}: the trace cannot be written: {error.strerror}; give another path"
        ) from error


def text_of(trace: Any) -> str:
    """The text of a trace's file: its record with its hash, and a line for each tensor.

    Raises:
        TraceError: the trace is not valid.
    """
    file, remedy = f"the trace of {shown(trace.model)}", "make it of the types that ModelTrace says"
    fields = checked_fields(trace, file, TraceError, remedy)
    _check_fields(Entry(fields, file, TraceError, remedy), vars(trace))
    record = _record_of(fields)
    tensors = record.pop("tensors")
    rest = record | {"sha256": _hash_of(record | {"tensors": tensors})}
    head = json.dumps(rest, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "tensors": [\n  ' + ",\n  ".join(map(json.dumps, tensors)) + "\n ]\n}\n"


def fingerprint(trace: Any) -> str:
    """The SHA-256 hash of a trace, in hexadecimal, as its file has it."""
    return _hash_of(_record_of(written(trace)))


def _record_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The record of a trace without its hash, from the JSON values of its fields."""
    kept = {key: fields[key] for key in _KEYS if key != "gathers" or fields[key]}
    return {"format": FORMAT, "version": VERSION} | kept


def _hash_of(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -------------------------------------------------------------------- reading


def fields_at(path_or_name: str | os.PathLike[str], kind: type[Any]) -> dict[str, Any]:
    """The fields of the trace in a file, or of a shipped one.

    Args:
        path_or_name: as for :meth:`ModelTrace.load <gckernels.sync.traces.model_trace.ModelTrace.load>`.
        kind: the class of traces.

    Raises:
        TraceError: there is no such trace, or it is not valid.
    """
    if not isinstance(path_or_name, str | os.PathLike):
        raise TraceError(f"ModelTrace.load: expected a path or a name, got {type(path_or_name).__name__}")
    path = os.fspath(path_or_name)
    if path == "-":
        return fields_in(sys.stdin.buffer.read(MAX_NBYTES + 1), "standard input", kind)
    shipped = shipped_traces()
    if isinstance(path, str) and path in shipped and not os.path.exists(path):
        return fields_in(shipped[path].read_bytes(), path, kind)
    try:
        return fields_in(bytes_of(path), os.fsdecode(path), kind)
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        names = ", ".join(sorted(shipped)) or "none"
        reason = error.strerror if isinstance(error, OSError) else error
        give = f"give the path of a trace or the name of a shipped one ({names})"
        raise TraceError(f"{path!r}: no trace can be read: {reason}; {give}") from error


def fields_in(text: str | bytes, file: str, kind: type[Any]) -> dict[str, Any]:
    """The fields of the trace in the text of a file: a record of ours, or a published list of tensors.

    Args:
        text: the text; bytes are UTF-8.
        file: the name of the file, for errors.
        kind: the class of traces.

    Raises:
        TraceError: the trace is not valid.
    """
    document = parsed(text, file, "trace", TraceError, _REMEDY)
    if isinstance(document.value, dict) and "format" not in document.value and "tensors" in document.value:
        return _published_fields(document)
    if isinstance(document.value, dict):
        _check_version(document)
    found = read_fields(document, kind, head=_HEAD, more=("sha256",))
    _check_fields(document, found)
    if "sha256" in document.value:
        _check_hash(document.fields((), None)["sha256"], document)
    return found


def _check_fields(document: Entry, found: dict[str, Any]) -> None:
    """Check that the fields of a trace agree with one another.

    Args:
        document: the record that they were read from.
        found: the fields.

    Raises:
        TraceError: they do not.
    """
    fields, tensors = document.fields((), None), found["tensors"]
    _check_order(fields["tensors"], tensors)
    for entry, tensor in zip(fields["tensors"].items(), tensors, strict=True):
        if tensor.shape is not None and (len(tensor.shape) > 64 or math.prod(tensor.shape) != tensor.numel):
            allowed = f"the sizes of at most 64 dimensions, of {tensor.numel} elements in all"
            entry.fields((), None)["shape"].refuse(allowed, str(list(tensor.shape[:8])))
    if found["backward_s"] < tensors[-1].ready_s:
        fields["backward_s"].refuse(f"at least the {tensors[-1].ready_s} seconds at which the last gradient is ready")
    buckets = found.get("buckets", ())
    listed = [name for bucket in buckets for name in bucket]
    if buckets and (sorted(listed) != sorted(tensor.name for tensor in tensors) or not all(buckets)):
        fields["buckets"].refuse(
            "lists, none of them empty, that together have the name of every tensor once", "others"
        )
    dtypes = {tensor.name: str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    for at, bucket in enumerate(buckets if not found.get("gathers") else ()):  # FSDP2 may cast a group to one dtype
        if len(mixed := sorted({dtypes[name] for name in bucket})) > 1:
            fields["buckets"].items()[at].refuse("tensors of one dtype, as in DDP's buckets", " and ".join(mixed))
    groups = {frozenset(bucket) for bucket in buckets}
    for at, gather in enumerate(found.get("gathers", ())):
        parts = fields["gathers"].items()[at].fields((), None)
        if gather.names and frozenset(gather.names) not in groups:
            parts["names"].refuse("the names of a bucket", "others")
        if gather.needed_s < gather.asked_s:
            parts["needed_s"].refuse(f"at least asked_s, {gather.asked_s} s")


def _check_order(entry: Entry, tensors: Sequence[TracedTensor]) -> None:
    """Raise a TraceError unless there are tensors, with different names, in the order of their ready times.

    Args:
        entry: the list of the tensors.
    """
    if not tensors:
        entry.refuse("a list of at least one tensor")
    seen: set[str] = set()
    for index, (here, tensor) in enumerate(zip(entry.items(), tensors, strict=True)):
        if tensor.name in seen:
            here.refuse("a tensor with a name of its own", f"the name {tensor.name!r} again")
        seen.add(tensor.name)
        if index and tensor.ready_s < tensors[index - 1].ready_s:
            before = tensors[index - 1]
            here.refuse(
                f"ready after {before.name!r} at {before.ready_s} s, because tensors stand in that order",
                f"{tensor.ready_s} s",
            )


def _check_version(document: Entry) -> None:
    version = document.value.get("version")
    if document.value.get("format") != FORMAT or type(version) is not int:
        document.refuse(f"a trace, whose format is {FORMAT!r} with a version, or a published list of tensors")
    if version != VERSION:
        newer = "a newer release of gckernels wrote it" if version > VERSION else "no release of gckernels wrote it"
        document.refuse(f"of version {VERSION}", f"version {version}, {newer}")


def _check_hash(entry: Entry, document: Entry) -> None:
    rest = {key: value for key, value in document.value.items() if key != "sha256"}
    if entry.text() != _hash_of(rest):
        entry.refuse(
            "the hash of the rest of the file, or left out after an edit by hand", "another one: it has changed"
        )


# -------------------------------------------------------------------- published traces


def _published_fields(document: Entry) -> dict[str, Any]:
    """The attributes of the trace in a published list of tensors. Keys that are not known here are allowed.

    Raises:
        TraceError: the document is not valid.
    """
    fields = document.fields(_PUBLISHED, None)
    source, batch = fields["source"].text(), fields.get("batch_per_gpu")
    if batch is not None and batch.value is not None:
        source += f" Batch per GPU: {batch.text()}."
    tensors = []
    for entry in fields["tensors"].items():
        given = entry.fields(("name", "numel", "ready_us"), None)
        tensors.append(
            TracedTensor(given["name"].name(), given["numel"].integer(), round(given["ready_us"].number() * 1e-6, 12))
        )
    _check_order(fields["tensors"], tensors)
    rest_s = fields["rest_us"].number() * 1e-6 if "rest_us" in fields else 0.0
    return {
        "model": fields["model"].text(),
        "tensors": _with_roles_by_name(tensors),
        "backward_s": tensors[-1].ready_s,
        "forward_s": rest_s,
        "source": source,
    }


def _with_roles_by_name(tensors: Sequence[TracedTensor]) -> tuple[TracedTensor, ...]:
    """The tensors with the roles that their names and sizes suggest.

    Vectors are biases, and weights with as many elements as the bias beside them, as norms have. Embeddings are called
    so. The output is the first weight in the order of backward, if nothing but its own bias comes before it: the last
    layer of a model with tied embeddings has no weight of its own.
    """
    sizes = {tensor.name: tensor.numel for tensor in tensors}
    found = []
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        words = tensor.name.lower().replace("_", ".").split(".")
        if last.startswith("bias") or sizes.get(f"{module}.bias") == tensor.numel or tensor.numel < 2:
            role = Role.VECTOR
        elif any(word.startswith("embed") or word in _EMBEDDINGS for word in words) or tensor.name == "encoder.weight":
            role = Role.EMBEDDING
        else:
            role = Role.WEIGHT
        found.append(replace(tensor, role=role))
    first = next((index for index, tensor in enumerate(found) if tensor.role is Role.WEIGHT), len(found))
    module = found[first].name.rpartition(".")[0] if first < len(found) else ""
    if first < len(found) and all(tensor.name.rpartition(".")[0] == module for tensor in found[:first]):
        found[first] = replace(found[first], role=Role.OUTPUT)
    return tuple(found)
