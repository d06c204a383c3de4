"""Descriptions as JSON: the entries of a file, and the rule that every number has a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gckernels.method import METHODS

from ...programs.topology import Topology
from ..machine import MachineError, Overheads, Shared
from .description import Description
from .entries import Entries, as_number, shortened, shown
from .parts import Copies, Curve, Gpu, Host, Link, PublishedCodec

DESCRIPTION_FORMAT = "gckernels machine"
"""The ``"format"`` of files with descriptions."""
DESCRIPTION_VERSION = 1
"""Their ``"version"``."""

_LINKS = (Shared.INTER, Shared.INTRA)


def description_from_json(record: dict[str, Any]) -> Description:
    """The description that :func:`description_to_json` has written.

    Args:
        record: the JSON object, whose format and version have been checked.

    Raises:
        MachineError: an entry is missing, unknown or not valid, or a number has no source.
    """
    entries = Entries(record)
    entries.value("format"), entries.value("version")
    name, about = entries.text("name"), entries.text("about", "")
    inside = entries.entries("topology")
    topology = Topology(inside.integer("machines"), inside.integer("devices"))
    inside.finish()
    device = entries.entries("device")
    gpu = Gpu.from_json(device) if device.choice("kind", ("cuda", "cpu")) == "cuda" else None
    device.finish()
    host = Host.from_json(entries.entries("host"))
    between = entries.entries("links")
    links = {link: Link.from_json(between.entries(link.value)) for link in _LINKS if link.value in between}
    between.finish(known=[link.value for link in _LINKS])
    copies = Copies.from_json(entries.entries("copies")) if "copies" in entries else None
    overheads = _overheads(entries.entries("overheads", optional=True))
    codecs = _codecs(entries.entries("codecs", optional=True))
    sources = entries.entries("sources")
    entries.finish(known=("about", "copies", "overheads", "codecs"))
    checked = _sources(record, sources)
    return Description(name, topology, host, links, gpu, copies, overheads, codecs, about, checked)


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
        "device": {"kind": "cpu"} if gpu is None else {"kind": "cuda"} | dataclasses.asdict(gpu),
        "host": dataclasses.asdict(description.host),
        "links": {link.value: description.links[link].to_json() for link in description.links},
        "overheads": dataclasses.asdict(description.overheads),
        "codecs": {
            name: {"encode": _points(codec.encode), "decode": _points(codec.decode)}
            for name, codec in description.codecs.items()
        },
    }
    if copies is not None:
        record["copies"] = dataclasses.asdict(copies)
    record["sources"] = dict(description.sources)
    _sources(record, Entries(record["sources"], "sources"))
    return record


def _overheads(entries: Entries) -> Overheads:
    overheads = Overheads(*(entries.number(each.name, 0.0) for each in dataclasses.fields(Overheads)))
    entries.finish()
    return overheads


# -------------------------------------------------------------------- published codecs


def _codecs(entries: Entries) -> dict[str, PublishedCodec]:
    codecs = {}
    for name in entries:
        if name not in METHODS:
            known = ", ".join(sorted(METHODS))
            raise MachineError(f"{entries.at(shortened(name))}: is no compressor; known are {known}")
        inside = entries.entries(name)
        codecs[name] = PublishedCodec(_curve(inside, "encode"), _curve(inside, "decode"))
        inside.finish()
    return codecs


def _curve(entries: Entries, key: str) -> Curve:
    path, pairs = entries.at(key), entries.value(key)
    if not isinstance(pairs, list) or len(pairs) < 2 or not all(isinstance(pair, list) for pair in pairs):
        raise MachineError(f"{path}: expected a list of at least two pairs [bytes, seconds], got {shown(pairs)}")
    points: list[tuple[float, float]] = []
    for index, pair in enumerate(pairs):
        if len(pair) != 2:
            raise MachineError(f"{path}[{index}]: expected a pair [bytes, seconds], got {shown(pair)}")
        nbytes, seconds = (as_number(value, f"{path}[{index}]") for value in pair)
        if points and (nbytes <= points[-1][0] or seconds < points[-1][1]):
            raise MachineError(f"{path}[{index}]: bytes must increase and seconds must not decrease, got {shown(pair)}")
        points.append((nbytes, seconds))
    return Curve(tuple(points))


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve.points]


# -------------------------------------------------------------------- sources


def _sources(record: dict[str, Any], entries: Entries) -> dict[str, str]:
    """The sources of a file, checked against its numbers.

    Raises:
        MachineError: a number has no source, or a source is of nothing in the file.
    """
    sources = {path: entries.text(path) for path in entries}
    entries.finish()
    inside = {
        key: value for key, value in record.items() if key not in ("format", "version", "name", "about", "sources")
    }
    covered: set[str] = set()
    for path in _numbers(inside, ""):
        around = {path[:end] for end in range(1, len(path) + 1) if end == len(path) or path[end] == "."} & {*sources}
        if not around:
            raise MachineError(f"sources: nothing says where {path} comes from; add the entry {shown(path)}")
        covered |= around
    for path in sources:
        if path not in covered:
            raise MachineError(f"sources: {shown(path)} is the source of no number in this file; correct its path")
    return sources


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
