"""Descriptions as JSON: the entries of a file, and the rule that every number has a source."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from gckernels.compressor import COMPRESSORS

from ...plans.json_files import Entry
from ...programs.topology import Topology
from .description import Description
from .machine import MachineError, Overheads, Shared
from .parts import (
    MAX_SHARING,
    CodecCurve,
    Copies,
    DescribedLink,
    Gpu,
    Host,
    PublishedCodec,
    at_least_zero,
    known,
    names_of,
)

DESCRIPTION_FORMAT = "gckernels machine"
"""The ``"format"`` of files with descriptions."""
DESCRIPTION_VERSION = 1
"""Their ``"version"``."""

_LINKS = (Shared.INTER, Shared.INTRA)
_REQUIRED = ("format", "version", "name", "topology", "device", "host", "links", "sources")
_OPTIONAL = ("about", "copies", "overheads", "codecs")
_REMEDY = "correct the description"


def description_from_json(document: Entry) -> Description:
    """The description that :func:`description_to_json` has written.

    Args:
        document: the JSON object, whose format and version have been checked.

    Raises:
        MachineError: an entry is missing, unknown or not valid, or a number has no source.
    """
    document = dataclasses.replace(document, remedy=_REMEDY)
    fields = document.fields(_REQUIRED, _OPTIONAL)
    inside = fields["topology"].fields(names_of(Topology))
    device = fields["device"].fields(("kind",), None)["kind"].choice(("cuda", "cpu"))
    if device == "cpu":
        fields["device"].fields(("kind",))
    links = fields["links"].fields((), [link.value for link in _LINKS])
    description = document.built(
        functools.partial(
            Description,
            fields["name"].name(),
            Topology(*(inside[name].integer(1, MAX_SHARING) for name in names_of(Topology))),
            Host.from_json(fields["host"]),
            {link: DescribedLink.from_json(links[link.value]) for link in _LINKS if link.value in links},
            Gpu.from_json(fields["device"]) if device == "cuda" else None,
            Copies.from_json(fields["copies"]) if "copies" in fields else None,
            _overheads(fields["overheads"]) if "overheads" in fields else Overheads(),
            _codecs(fields["codecs"]) if "codecs" in fields else {},
            fields["about"].text() if "about" in fields else "",
            {path: each.text() for path, each in fields["sources"].mapping().items()},
        )
    )
    _check_sources(document.value, fields["sources"])
    return description


def description_to_json(description: Description) -> dict[str, Any]:
    """A description as a dict of JSON values.

    Raises:
        MachineError: a number has no source.
    """
    gpu, copies = description.gpu, description.copies
    record: dict[str, Any] = {
        "format": DESCRIPTION_FORMAT,
        "version": DESCRIPTION_VERSION,
        "name": description.name,
        "about": description.about,
        "topology": dataclasses.asdict(description.topology),
        "device": {"kind": "cpu"} if gpu is None else {"kind": "cuda"} | known(gpu),
        "host": known(description.host),
        "links": {link.value: known(description.links[link]) for link in description.links},
        "overheads": dataclasses.asdict(description.overheads),
        "codecs": {
            name: {"encode": _points(codec.encode), "decode": _points(codec.decode)}
            for name, codec in description.codecs.items()
        },
    }
    if copies is not None:
        record["copies"] = dataclasses.asdict(copies)
    record["sources"] = dict(description.sources)
    _check_sources(record, Entry(record["sources"], description.name, MachineError, _REMEDY, "sources"))
    return record


def _overheads(entry: Entry) -> Overheads:
    fields = entry.fields((), names_of(Overheads))
    return Overheads(**{name: at_least_zero(each) for name, each in fields.items()})


# -------------------------------------------------------------------- published codecs


def _codecs(entry: Entry) -> dict[str, PublishedCodec]:
    codecs = {}
    for name, codec in entry.fields((), sorted(COMPRESSORS)).items():
        fields = codec.fields(("encode", "decode"))
        codecs[name] = PublishedCodec(_curve(fields["encode"]), _curve(fields["decode"]))
    return codecs


def _curve(entry: Entry) -> CodecCurve:
    if len(entry.items()) < 2:
        entry.refuse("a list of at least two pairs [bytes, seconds]")
    points: list[tuple[float, float]] = []
    for pair in entry.items():
        if len(pair.items()) != 2:
            pair.refuse("a pair [bytes, seconds]")
        nbytes, seconds = map(at_least_zero, pair.items())
        if points and (nbytes <= points[-1][0] or seconds < points[-1][1]):
            pair.refuse("of more bytes and no fewer seconds than the pair before it", str(pair.value))
        points.append((nbytes, seconds))
    return CodecCurve(tuple(points))


def _points(curve: CodecCurve) -> list[list[float]]:
    return [list(point) for point in curve.points]


# -------------------------------------------------------------------- sources


def _check_sources(record: dict[str, Any], entry: Entry) -> None:
    """Raise a MachineError if a number of a file has no source, or a source is of nothing in the file.

    Args:
        record: the file.
        entry: its sources.
    """
    sources = entry.mapping()
    inside = {
        key: value for key, value in record.items() if key not in ("format", "version", "name", "about", "sources")
    }
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
