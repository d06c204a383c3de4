"""Objects: a patch or an anchor as bytes, of all elements of a layout or of some spans of them.

Fields, little-endian:

====== ====== ================================================================
offset nbytes
====== ====== ================================================================
0      4      ``GKp1``, or ``GKk1`` if the end is an HMAC
4      4      the number of spans
8      8      the version of the weights after
16     8      the version before; in an anchor ``2**64 - 1``
24     32     the digest of the layout
56     8      the number of elements in the layout
64     8      the digest of the elements of the spans before; 0 in an anchor
72     8      the same after
80     16 s   each of ``s`` spans: the number of the first element, and the number of elements
\\      4 c    each of ``c`` chunks: its number of bytes, plus ``2**31`` if all of it is sent
\\      ..     the chunks, one behind the other
\\      32     SHA-256 of everything before it, or the HMAC with SHA-256 of it
====== ====== ================================================================

The elements of all spans, one behind the other, are cut into chunks of 2**20, and where their kind changes. An object
in which all of every chunk is sent depends on nothing. So is every chunk of which more than 60 % has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .elements import Elements, Piece, Span
from .errors import PatchError
from .layout import TensorLayout

NO_BASE = 2**64 - 1
_HEAD, _SPAN, _DENSE = struct.Struct("<4sIQQ32sQQQ"), struct.Struct("<QQ"), 2**31
_MAGICS = {False: b"GKp1", True: b"GKk1"}
_END_NBYTES = 32


@dataclass(frozen=True)
class PatchObject:
    """The content of an object.

    Attributes:
        version: the version of the weights after.
        base: the version before, or ``NO_BASE``.
        layout: the digest of the layout.
        numel: the number of elements in the layout.
        before: the digest of the elements before.
        after: the digest after.
        spans: the elements.
        chunks: for each chunk whether all of it is sent, and its bytes.
    """

    version: int
    base: int
    layout: bytes
    numel: int
    before: int
    after: int
    spans: tuple[Span, ...]
    chunks: tuple[tuple[bool, bytes], ...] = field(repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether it has all elements, so that it depends on nothing."""
        return all(is_dense for is_dense, _ in self.chunks)

    def sealed(self, key: bytes | None) -> bytes:
        """The object as bytes, with an HMAC if there is a key."""
        head = (_MAGICS[key is not None], len(self.spans), self.version, self.base, self.layout)
        parts = [_HEAD.pack(*head, self.numel, self.before, self.after)]
        parts += [_SPAN.pack(*span) for span in self.spans]
        parts += [(len(data) | _DENSE * is_dense).to_bytes(4, "little") for is_dense, data in self.chunks]
        content = b"".join([*parts, *(data for _, data in self.chunks)])
        return content + _seal(content, key)


def _seal(content: bytes | memoryview, key: bytes | None) -> bytes:
    return hashlib.sha256(content).digest() if key is None else hmac.digest(key, content, "sha256")


def opened(data: bytes, key: bytes | None, layout: TensorLayout, name: str) -> PatchObject:
    """The object in bytes, of which all but the chunks has been checked.

    Args:
        data: the bytes.
        key: the key of the HMAC, or ``None`` for SHA-256.
        layout: the layout of the tensors that it is for.
        name: its name, for errors.

    Raises:
        PatchError: it is damaged, sealed in another way, or of other tensors.
    """
    view = memoryview(data)
    if len(data) < _HEAD.size + _END_NBYTES or bytes(view[:4]) not in _MAGICS.values():
        raise PatchError(f"{name} is no patch")
    magic, num_spans, version, base, digest, numel, before, after = _HEAD.unpack_from(data)
    if magic != _MAGICS[key is not None]:
        raise PatchError(f"{name} {'has no HMAC, and a key is given' if key else 'has an HMAC: give its key'}")
    if not hmac.compare_digest(_seal(view[:-_END_NBYTES], key), view[-_END_NBYTES:]):
        raise PatchError(f"{name} is damaged" + (", or sealed with another key" if key else ""))
    if (digest, numel) != (layout.digest, layout.numel):
        raise PatchError(f"{name} is for tensors of other names, shapes or types")
    at, end = _HEAD.size, len(data) - _END_NBYTES
    if num_spans > (end - at) // _SPAN.size:
        raise PatchError(f"{name}: its spans are cut off")
    spans = tuple(_SPAN.iter_unpack(view[at : at + _SPAN.size * num_spans]))
    previous = 0
    for first, count in spans:
        if first < previous or not 0 < count <= numel - first:
            raise PatchError(f"{name}: its spans do not ascend, or are not in the layout")
        previous = first + count
    at += _SPAN.size * num_spans
    sizes = []
    for _ in range(_num_chunks(spans, layout)):
        sizes.append(int.from_bytes(view[at : at + 4], "little"))
        at += 4
    if at + sum(size % _DENSE for size in sizes) != end:
        raise PatchError(f"{name}: its chunks have another size")
    chunks = []
    for size in sizes:
        chunks.append((size >= _DENSE, bytes(view[at : at + size % _DENSE])))
        at += size % _DENSE
    return PatchObject(version, base, digest, numel, before, after, spans, tuple(chunks))


def _num_chunks(spans: Sequence[Span], layout: TensorLayout) -> int:
    """The number of chunks of the elements of some spans."""
    byte = torch.empty(1, dtype=torch.uint8, device="cpu")
    pieces = tuple(Piece(entry, entry.first, byte.expand(entry.numel)) for entry in layout.entries)
    return len(Elements(layout, pieces).within(spans).chunks())
