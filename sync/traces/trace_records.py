"""Traces as JSON records, and back. Version 1 of the format has everything that a
:class:`~gckernels.sync.traces.model_trace.ModelTrace` has, and the SHA-256 hash of the rest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gckernels.toolkit.fields import dtype_named

from ..plans.json_files import MAX_NUMBER, Entry, shown
from .traced_tensors import Role, TracedTensor, TraceError

FORMAT = "gckernels trace"
VERSION = 1
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of gradients."""

_TRACE = ("format", "version", "model", "backward_s", "tensors")
_MORE = ("forward_s", "optimizer_s", "buckets", "copies_gradients", "source", "sha256")
_TENSOR = ("name", "numel", "ready_s")
_MORE_OF_TENSOR = ("shape", "dtype", "role", "norm", "errors")


class RecordedTrace(Protocol):
    """The attributes that a record has of a trace."""

    @property
    def model(self) -> str: ...
    @property
    def tensors(self) -> tuple[TracedTensor, ...]: ...
    @property
    def backward_s(self) -> float: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def optimizer_s(self) -> float: ...
    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def source(self) -> str: ...
    @property
    def copies_gradients(self) -> bool: ...


def hash_of(trace: RecordedTrace) -> str:
    """The SHA-256 hash of a trace, in hexadecimal, as its file has it."""
    return _hash(_without_hash(trace))


def checked_text(trace: RecordedTrace) -> str:
    """The text of a trace's file: its record with its hash.

    Raises:
        TraceError: the trace is not valid.
    """
    where = f"the trace of {shown(trace.model)}"
    try:
        record = _without_hash(trace)
        record |= {"sha256": _hash(record)}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"{where}: it has values of wrong types: {error}; make it of the types that ModelTrace says"
        ) from error
    fields_of(Entry(record, where, TraceError, "correct the trace"))
    tensors = record.pop("tensors")
    head = json.dumps(record, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "tensors": [\n  ' + ",\n  ".join(map(json.dumps, tensors)) + "\n ]\n}\n"


def fields_of(document: Entry) -> dict[str, Any]:
    """The attributes of the trace in a record.

    Raises:
        TraceError: the record is not valid.
    """
    if isinstance(document.value, dict):
        _check_version(document)
    fields = document.fields(_TRACE, _MORE)
    tensors = tuple(map(_tensor, fields["tensors"].items()))
    backward_s = fields["backward_s"].number()
    check_order(fields["tensors"], tensors)
    if backward_s < tensors[-1].ready_s:
        fields["backward_s"].refuse(f"at least the {tensors[-1].ready_s} seconds at which the last gradient is ready")
    found = {
        "model": fields["model"].text(),
        "tensors": tensors,
        "backward_s": backward_s,
        "forward_s": fields["forward_s"].number() if "forward_s" in fields else 0.0,
        "optimizer_s": fields["optimizer_s"].number() if "optimizer_s" in fields else 0.0,
        "buckets": _buckets(fields["buckets"], tensors) if "buckets" in fields else (),
        "source": fields["source"].text() if "source" in fields else "",
        "copies_gradients": fields["copies_gradients"].boolean() if "copies_gradients" in fields else False,
    }
    if "sha256" in fields:
        _check_hash(fields["sha256"], document)
    return found


def check_order(entry: Entry, tensors: Sequence[TracedTensor]) -> None:
    """Raise a TraceError unless there are tensors, with different names, in the order of their ready times.

    Args:
        entry: the list of the tensors.
        tensors: the tensors.
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


def _without_hash(trace: RecordedTrace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": trace.model,
        "source": trace.source,
        "forward_s": float(trace.forward_s),
        "backward_s": float(trace.backward_s),
        "optimizer_s": float(trace.optimizer_s),
        "buckets": [list(bucket) for bucket in trace.buckets],
        "copies_gradients": trace.copies_gradients,
        "tensors": [
            {
                "name": tensor.name,
                "numel": tensor.numel,
                "ready_s": float(tensor.ready_s),
                "shape": None if tensor.shape is None else list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "role": tensor.role.value,
                "norm": None if tensor.norm is None else float(tensor.norm),
                # an encoding that makes inf has an error without bound
                "errors": {spec: min(float(error), MAX_NUMBER) for spec, error in tensor.errors.items()},
            }
            for tensor in trace.tensors
        ],
    }


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_version(document: Entry) -> None:
    version = document.value.get("version")
    if document.value.get("format") != FORMAT or type(version) is not int:
        document.refuse(f"a trace, whose format is {FORMAT!r} with a version, or a published list of tensors")
    if version != VERSION:
        newer = "a newer release of gckernels wrote it" if version > VERSION else "no release of gckernels wrote it"
        document.refuse(f"of version {VERSION}", f"version {version}, {newer}")


def _check_hash(entry: Entry, document: Entry) -> None:
    rest = {key: value for key, value in document.value.items() if key != "sha256"}
    if entry.text() != _hash(rest):
        entry.refuse(
            "the hash of the rest of the file, or left out after an edit by hand", "another one: it has changed"
        )


def _tensor(entry: Entry) -> TracedTensor:
    fields = entry.fields(_TENSOR, _MORE_OF_TENSOR)
    numel = fields["numel"].integer()
    return TracedTensor(
        name=fields["name"].name(),
        numel=numel,
        ready_s=fields["ready_s"].number(),
        shape=fields["shape"].maybe(lambda shape: _shape(shape, numel)) if "shape" in fields else None,
        dtype=_dtype(fields["dtype"]) if "dtype" in fields else torch.float32,
        role=fields["role"].member(Role) if "role" in fields else Role.WEIGHT,
        norm=fields["norm"].maybe(Entry.number) if "norm" in fields else None,
        errors={spec: each.number() for spec, each in fields["errors"].mapping().items()} if "errors" in fields else {},
    )


def _shape(entry: Entry, numel: int) -> tuple[int, ...]:
    sizes = tuple(each.integer() for each in entry.items())
    if len(sizes) > 64 or math.prod(sizes) != numel:
        entry.refuse(f"the sizes of at most 64 dimensions, of {numel} elements in all", str(list(sizes[:8])))
    return sizes


def _dtype(entry: Entry) -> torch.dtype:
    dtype = dtype_named(entry.text())
    if dtype is None or dtype not in DTYPES:
        entry.refuse(f"one of {', '.join(str(each).removeprefix('torch.') for each in DTYPES)}")
    return dtype


def _buckets(entry: Entry, tensors: Sequence[TracedTensor]) -> tuple[tuple[str, ...], ...]:
    buckets = tuple(tuple(name.name() for name in bucket.items()) for bucket in entry.items())
    listed = [name for bucket in buckets for name in bucket]
    if buckets and (sorted(listed) != sorted(tensor.name for tensor in tensors) or not all(buckets)):
        entry.refuse("lists, none of them empty, that together have the name of every tensor once", "others")
    return buckets
