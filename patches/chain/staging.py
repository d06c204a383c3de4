"""Staging: downloading, checking and decoding what leads from one version to another, without writing a weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..format.changes import Change, decoded
from ..format.elements import Elements
from ..format.errors import PatchError
from ..format.objects import PatchObject, opened
from .records import Latest, VersionRecord, read_version
from .stores import PatchStore

_MODULUS = 2**64


@dataclass(frozen=True)
class Position:
    """A place in a chain: the run, the version, and the digest of the weights."""

    run: str
    version: int
    digest: int


@dataclass(frozen=True)
class StagedVersion:
    """A version that has been fetched and checked, for ``Follower.apply``.

    Attributes:
        version: the version.
        digest: the digest of the weights at this version.
        nbytes: the bytes of the objects that were read.
        base: the version of the weights that it begins at; ``None`` if it has all of them.
    """

    version: int
    digest: int
    nbytes: int
    base: int | None
    begin: Position | None = field(repr=False)
    end: Position = field(repr=False)
    elements: Elements = field(repr=False)
    parts: Sequence[Change] = field(repr=False)

    def changes(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """``(name, indices, values)`` of all changed tensors: flat indices, int64, ascending, and the new values.

        A tensor may come in several pieces. Tensors that are the same memory come under the first name. Where all
        weights were read (``base`` is ``None``), all of them are given.
        """
        for change in self.parts:
            for piece, shift, _, at in change.chunk.cut(change.positions):
                begin = piece.first - piece.entry.first
                positions = torch.arange(at.start, at.stop, dtype=torch.int64, device="cpu")
                if change.positions is not None:
                    positions = change.positions[at].long()
                places, values, dtype = positions + shift, change.new[at], piece.entry.dtype
                per = dtype.itemsize // piece.entry.kind.nbytes
                if per == 1:
                    yield piece.entry.name, places + begin, values.view(dtype)
                    continue
                indices = torch.unique((places + begin) // per)  # the type is taken byte by byte
                first = int(indices[0]) * per - begin
                nbytes = (int(indices[-1]) + 1) * per - begin - first
                if first < 0 or first + nbytes > piece.numel:
                    raise PatchError(f"{piece.entry.name}: an element lies in two pieces")
                rows = piece.bits(first, first + nbytes).clone()
                rows[places - first] = values
                yield piece.entry.name, indices, rows.view(dtype)[indices - indices[0]]


def stage(
    store: PatchStore, latest: Latest, elements: Elements, key: bytes | None, begin: Position | None, part: int | None
) -> StagedVersion:
    """The changes that lead to the newest version: from a position, or, if that is ``None``, from its anchor.

    Args:
        store: the store.
        latest: the newest version.
        elements: all elements, or those of one part.
        key: the key of the HMACs.
        begin: the position of the elements.
        part: the number of the part; ``None`` for all parts.

    Raises:
        PatchError: something is missing, damaged, or does not follow.
    """
    records = _records(store, latest, begin)
    if records[0].is_whole:
        begin = None
    nbytes, columns = 0, []
    for record in records:
        if part is not None and part >= len(record.objects):
            raise PatchError(f"version {record.version} has other parts")
        found = []
        for name in record.objects if part is None else record.objects[part : part + 1]:
            data = store.get(name)
            if data is None:
                raise PatchError(f"{name} is not in the store")
            nbytes += len(data)
            found.append(opened(data, key, elements.layout, name))
            _check_version(found[-1], record, name)
        columns.append(found)
    _check_chain(columns, begin, elements, part is None)
    changes: list[Change] = []
    for objects in zip(*columns, strict=True):
        changes += decoded(objects, elements.within(objects[0].spans))
    digest = sum(each.after for each in columns[-1]) % _MODULUS
    end = Position(latest.run, records[-1].version, digest)
    base = None if begin is None else begin.version
    return StagedVersion(end.version, digest, nbytes, base, begin, end, elements, changes)


def _records(store: PatchStore, latest: Latest, begin: Position | None) -> list[VersionRecord]:
    """The records to read, of which the first one follows the position or has all weights."""
    anchor = read_version(store, latest.anchor) if begin is None else None
    if begin is None and (anchor is None or not anchor.is_whole):
        raise PatchError(f"{latest.anchor} is not in the store, or no anchor")
    start = anchor.version if anchor is not None else begin.version if begin is not None else 0
    records = [] if anchor is None else [anchor]
    for version in range(start + 1, latest.version + 1):
        record = read_version(store, f"version-{version}")
        if record is None:
            raise PatchError(f"version-{version} is not in the store")
        if record.version != version:
            raise PatchError(f"version-{version} is the record of version {record.version}")
        records = [record] if record.is_whole else [*records, record]
    if any((each.run, each.layout) != (latest.run, latest.layout) for each in records):
        raise PatchError("the versions in the store are those of several runs")
    if not records or records[-1].version != latest.version:
        raise PatchError(f"nothing in the store leads to version {latest.version}")
    return records


def _check_version(found: PatchObject, record: VersionRecord, name: str) -> None:
    """Check that an object is one of a record's version."""
    if found.version != record.version:
        raise PatchError(f"{name} is of version {found.version}, not {record.version}")
    if record.is_whole and not found.is_whole:
        raise PatchError(f"{name} does not have all weights")
    if not found.is_whole and found.base != record.version - 1:
        raise PatchError(f"{name} follows version {found.base}, not {record.version - 1}")


def _check_chain(
    columns: Sequence[Sequence[PatchObject]], begin: Position | None, elements: Elements, is_all: bool
) -> None:
    """Check that the objects of versions follow each other, and cover the elements once."""
    first = columns[0]
    spans = sorted(span for each in first for span in each.spans)
    covered = 0
    for start, numel in spans:
        if is_all and start != covered:
            raise PatchError(f"element {min(start, covered):,} is in no part of a version, or in two")
        covered = start + numel
    if is_all and covered != elements.layout.numel:
        raise PatchError(f"element {covered:,} is in no part of a version")
    if not is_all and tuple(spans) != elements.spans():
        raise PatchError("the part has other elements")
    if begin is not None and (sum(each.before for each in first) - begin.digest) % _MODULUS:
        raise PatchError(f"version {first[0].version} follows other weights than these")
    for earlier, later in itertools.pairwise(columns):
        if [each.spans for each in earlier] != [each.spans for each in later]:
            raise PatchError(f"version {later[0].version} has other parts than the one before")
        for one, other in zip(earlier, later, strict=True):
            if not other.is_whole and one.after != other.before:
                raise PatchError(f"version {other.version} does not follow version {one.version}")
