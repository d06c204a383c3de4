"""Files of machines: descriptions and profiles as versioned JSON, and the descriptions that come with the package.

Every number of a description has a source.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from gckernels.sync.plans.json_files import Entry, bytes_of, parsed
from gckernels.sync.plans.json_records import read_record, written
from gckernels.toolkit.fields import shown

from .description import Description
from .machine import Machine, MachineError, Overheads
from .profile import MEASURE_AGAIN, PROFILE_FORMAT, VERSION, Profile

DESCRIPTION_FORMAT = "gckernels machine"
"""The ``"format"`` of files with descriptions."""

_KEYS = ("name", "about", "topology", "device", "host", "links", "overheads", "codecs", "copies", "sources")
"""The keys of descriptions in the order of files."""
_OPTIONAL = ("about", "copies", "overheads", "codecs", "memory_nbytes", "limit_bit_per_s", "one_medium")
_CORRECT = "correct the description"
_SUFFIX = ".json"
_REMEDY = "write the file anew: 'gckernels profile -o FILE' measures a machine"


def load_machine(path_or_name: str | os.PathLike[str]) -> Machine:
    """The machine in a file, or the shipped description with a name.

    Args:
        path_or_name: a name of :func:`machine_names`, or else the path of a file. A file with such a name is read as
            ``"./NAME"``.

    Raises:
        MachineError: there is neither a file nor a shipped machine, or the file is not valid. The message names the
            file and the entry, and says what is allowed.
    """
    given = os.fspath(path_or_name)
    if given in machine_names():
        return machine_from_text(_shipped().joinpath(given + _SUFFIX).read_text(encoding="utf-8"), given)
    try:
        text = bytes_of(given)
    except FileNotFoundError as error:
        known = ", ".join(machine_names())
        raise MachineError(
            f"{shown(given)}: there is no such file, and no shipped machine with this name; shipped are {known}"
        ) from error
    except (OSError, ValueError) as error:  # a ValueError for a path with a null character
        raise MachineError(f"{shown(given)}: cannot be read: {error}") from error
    return machine_from_text(text, given)


def machine_names() -> tuple[str, ...]:
    """The names of the shipped descriptions, in alphabetical order."""
    names = (file.name for file in _shipped().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def _shipped() -> Traversable:
    """The folder of the shipped descriptions."""
    return resources.files(__package__).joinpath("shipped")


def machine_from_text(text: str | bytes, file: str) -> Machine:
    """The machine in the text of a file.

    Args:
        text: the content of the file; bytes are UTF-8.
        file: the name of the file, for errors.

    Raises:
        MachineError: the text is not valid.
    """
    document = parsed(text, file, "machine", MachineError, _REMEDY)
    readers: dict[str, Callable[[Entry], Machine]] = {
        DESCRIPTION_FORMAT: description_from_json,
        PROFILE_FORMAT: profile_from_json,
    }
    head = document.fields(("format", "version"), None)
    read = readers[head["format"].choice(readers)]
    head["version"].integer(VERSION, VERSION)
    return read(document)


def profile_from_json(record: Any) -> Profile:
    """The profile that :meth:`Profile.to_json` has written.

    Args:
        record: the JSON value, or its entry in a file.

    Raises:
        MachineError: it has another format or version, or something in it is not valid.
    """
    document = record if isinstance(record, Entry) else Entry(record, "profile", MachineError, MEASURE_AGAIN)
    head = document.fields(("format", "version"), None)
    head["format"].choice((PROFILE_FORMAT,))
    head["version"].integer(VERSION, VERSION)
    return read_record(replace(document, optional=("memory_nbytes",)), Profile, head=("format", "version"))


# -------------------------------------------------------------------- descriptions


def description_from_json(document: Entry) -> Description:
    """The description that :func:`description_to_json` has written.

    Args:
        document: the JSON object, whose format and version have been checked.

    Raises:
        MachineError: an entry is missing, unknown or not valid, or a number has no source.
    """
    optional = (*_OPTIONAL, *(each.name for each in dataclasses.fields(Overheads)))
    document = dataclasses.replace(document, remedy=_CORRECT, optional=optional)
    description = read_record(document, Description, head=("format", "version"))
    _check_sources(document)
    return description


def description_to_json(description: Description) -> dict[str, Any]:
    """A description as a dict of JSON values.

    Raises:
        MachineError: a number has no source.
    """
    fields = written(description)
    record = {"format": DESCRIPTION_FORMAT, "version": VERSION}
    record |= {key: fields[key] for key in _KEYS if fields[key] is not None}
    _check_sources(Entry(record, description.name, MachineError, _CORRECT))
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
