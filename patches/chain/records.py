"""Records: what the objects of a store are, as JSON.

====================== ==================================================================================
name                   content
====================== ==================================================================================
``latest``             the newest version, its anchor, the run, and the digest of the layout
``layout-DIGEST``      a layout (:mod:`gckernels.patches.format.layout`)
``version-N``          the record of version N: the names of its objects, one for each part of the weights
``anchor-N``           the record of all weights at version N
``patch-N-NONCE.RANK`` an object of version N
``dense-N-NONCE.RANK`` an object with all weights of a part at version N
====================== ==================================================================================

A version exists when its record does. Records are written once: of several publishers, or a killed one and the next,
one has its record there, and the objects of the others have names that nobody reads. ``latest`` follows.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..format.errors import PatchError
from ..format.layout import TensorLayout
from .stores import PatchStore, checked_name

T = TypeVar("T", "Latest", "VersionRecord")
_NUMBERED = re.compile(r"(?:version|anchor|patch|dense)-(\d{1,18})\b.*")
_MAX_VERSION = 2**63


@dataclass(frozen=True)
class Latest:
    """The newest version.

    Attributes:
        version: its number.
        anchor: the name of the record from which its chain begins.
        run: a random word, the same in all versions of a chain.
        layout: the digest of the layout, in hexadecimal digits.
    """

    version: int
    anchor: str
    run: str
    layout: str


@dataclass(frozen=True)
class VersionRecord:
    """A version, or an anchor.

    Attributes:
        version: its number.
        is_whole: whether its objects have all weights, so that nothing before it is needed.
        objects: the names of its objects.
        run, layout: as in :class:`Latest`.
    """

    version: int
    is_whole: bool
    objects: tuple[str, ...]
    run: str
    layout: str


def text_of(record: Latest | VersionRecord) -> bytes:
    """A record as JSON."""
    return json.dumps({"format": "gckernels.patches 1"} | asdict(record)).encode()


def latest_of(text: bytes) -> Latest:
    """The record with this text."""
    return _record("latest", text, Latest)


def read_latest(store: PatchStore) -> Latest | None:
    """The record of the newest version, or ``None`` in an empty store."""
    data = store.get("latest")
    return None if data is None else _record("latest", data, Latest)


def read_version(store: PatchStore, name: str) -> VersionRecord | None:
    """The record of a version or an anchor, or ``None`` if it is not there."""
    data = store.get(name)
    return None if data is None else _record(name, data, VersionRecord)


def _record(name: str, text: bytes, cls: type[T]) -> T:
    try:
        found = json.loads(text)
        if found.pop("format") != "gckernels.patches 1":
            raise ValueError("another format")
        record = cls(**(found | ({"objects": tuple(found["objects"])} if "objects" in found else {})))
        _check(record)
        return record
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PatchError(f"{name} is damaged: {type(error).__name__}: {error}") from None


def _check(record: Any) -> None:
    names = record.objects if isinstance(record, VersionRecord) else (record.anchor,)
    for name in names:
        checked_name(name)
    if type(record.version) is not int or not 0 <= record.version < _MAX_VERSION:
        raise ValueError(f"{record.version!r} is no version")
    if type(record.run) is not str or not re.fullmatch("([0-9a-f]{64})?", record.layout):
        raise ValueError("it names no run, or no layout")
    if isinstance(record, VersionRecord) and (not names or type(record.is_whole) is not bool):
        raise ValueError("it names no objects")


def read_layout(store: PatchStore, digest: str) -> TensorLayout:
    """The layout with this digest.

    Raises:
        PatchError: it is missing or damaged.
    """
    text = store.get(f"layout-{digest}")
    if text is None:
        raise PatchError(f"layout-{digest} is not in the store")
    return TensorLayout.from_text(text, bytes.fromhex(digest))


def number_of(name: str) -> int | None:
    """The version to which an object or record belongs; ``None`` for other names."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None
