"""Descriptions as JSON: the entries of a file, and the rule that every number has a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ...plans.json_files import Entry
from ...plans.json_records import read_record, written
from .description import Description
from .machine import MachineError, Overheads

DESCRIPTION_FORMAT = "gckernels machine"
"""The ``"format"`` of files with descriptions."""
DESCRIPTION_VERSION = 1
"""Their ``"version"``."""

_KEYS = ("name", "about", "topology", "device", "host", "links", "overheads", "codecs", "copies", "sources")
"""The keys of descriptions in the order of files."""
_OPTIONAL = ("about", "copies", "overheads", "codecs", "memory_nbytes", "limit_bit_per_s", "one_medium")
_REMEDY = "correct the description"


def description_from_json(document: Entry) -> Description:
    """The description that :func:`description_to_json` has written.

    Args:
        document: the JSON object, whose format and version have been checked.

    Raises:
        MachineError: an entry is missing, unknown or not valid, or a number has no source.
    """
    optional = (*_OPTIONAL, *(each.name for each in dataclasses.fields(Overheads)))
    document = dataclasses.replace(document, remedy=_REMEDY, optional=optional)
    description = read_record(document, Description, head=("format", "version"))
    _check_sources(document)
    return description


def description_to_json(description: Description) -> dict[str, Any]:
    """A description as a dict of JSON values.

    Raises:
        MachineError: a number has no source.
    """
    fields = written(description)
    record = {"format": DESCRIPTION_FORMAT, "version": DESCRIPTION_VERSION}
    record |= {key: fields[key] for key in _KEYS if fields[key] is not None}
    _check_sources(Entry(record, description.name, MachineError, _REMEDY))
    return record


def _check_sources(document: Entry) -> None:
    """Raise a MachineError if a number of a file has no source, or a source is of nothing in the file."""
    entry = document.fields((), None)["sources"]
    sources = entry.mapping()
    beside = ("format", "version", "name", "about", "sources")
    inside = {key: value for key, value in document.value.items() if key not in beside}
    covered: set[str] = set()
    for path in _numbers(inside, ""):
        around = {path[:end] for end in range(1, len(path) + 1) if end == len(path) or path[end] == "."} & {*sources}
        if not around:
            entry.refuse(f"an object that says where {path} comes from", f"none with {path!r}")
        covered |= around
    for path, source in sources.items():
        if path not in covered:
            source.refuse("the source of a number in this file", "a path at which there is none")


def _numbers(value: Any, path: str) -> Iterator[str]:
    """The dotted paths of all numbers in a JSON value; a list of numbers has one path."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from _numbers(inside, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        if value:
            yield path
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path
