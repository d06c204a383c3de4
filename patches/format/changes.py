"""Changes: from tensors to an object, and from objects to changes of tensors, which are written when all is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gckernels.toolkit.host.threads import run_parts

from . import host
from .elements import Chunk, Elements, Piece
from .errors import PatchError
from .objects import NO_BASE, PatchObject

_MODULUS = 2**64


@dataclass(frozen=True)
class Change:
    """New bits of elements of a chunk.

    Attributes:
        chunk: the chunk.
        positions: the changed positions, int32, ascending; ``None`` for all.
        old: the bits there before; ``None`` if they do not matter.
        new: the bits after.
        delta: the digest of the new bits less that of the old ones, or less nothing if these do not matter.
    """

    chunk: Chunk
    positions: torch.Tensor | None
    old: torch.Tensor | None
    new: torch.Tensor
    delta: int

    @classmethod
    def between(cls, chunk: Chunk, old: torch.Tensor, new: torch.Tensor, positions: torch.Tensor | None) -> Change:
        """The change from the old bits of a whole chunk to new ones: those at some positions, or of the chunk."""
        if positions is None:
            return cls(chunk, None, old, new, chunk.digest(new) - chunk.digest(old))
        places = positions.long()
        return cls.at(chunk, positions, old[places], new[places])

    @classmethod
    def at(cls, chunk: Chunk, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Change:
        """The change at some positions, from old bits there to new ones."""
        return cls(chunk, positions, old, new, chunk.digest(new, positions) - chunk.digest(old, positions))

    def applied(self, bits: torch.Tensor) -> torch.Tensor:
        """A copy of the bits of the chunk with this change."""
        if self.positions is None:
            return self.new
        changed = bits.clone()
        changed[self.positions.long()] = self.new
        return changed

    def require_old(self) -> None:
        """Check that the tensors have the old bits where there are changes.

        Raises:
            PatchError: they have others.
        """
        for piece, places, values in self._parts(self.old):
            if not torch.equal(piece.flat[places], values):
                raise PatchError(f"{piece.entry.name} is not what it was when the patch was read: fetch again")

    def write(self) -> None:
        """Write the new bits into the tensors."""
        for piece, places, values in self._parts(self.new):
            piece.flat[places] = values

    def _parts(self, bits: torch.Tensor | None) -> list[tuple[Piece, torch.Tensor | slice, torch.Tensor]]:
        """``(piece, places, bits)`` of every tensor with changes, on its device."""
        found: list[tuple[Piece, torch.Tensor | slice, torch.Tensor]] = []
        if bits is None:
            return found
        for piece, shift, _, at in self.chunk.cut(self.positions):
            places: torch.Tensor | slice = slice(at.start + shift, at.stop + shift)
            if self.positions is not None:
                places = (self.positions[at].long() + shift).to(piece.flat.device)
            found.append((piece, places, bits[at].to(piece.flat.device)))
        return found


def encoded(old: Elements, new: Elements, version: int, base: int, before: int) -> tuple[PatchObject, list[Change]]:
    """The patch from old to new elements, and its changes of the old ones.

    Args:
        old: the elements before.
        new: the same elements of the layout after.
        version: the version after.
        base: the version before.
        before: the digest of the old elements.
    """
    pairs = list(zip(old.chunks(), new.chunks(), strict=True))
    return _encoded(old, [(chunk, chunk.bits, later.bits) for chunk, later in pairs], version, base, before)


def _encoded(
    old: Elements,
    pairs: Sequence[tuple[Chunk, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]],
    version: int,
    base: int,
    before: int,
) -> tuple[PatchObject, list[Change]]:
    """Like :func:`encoded`, of ``(chunk, old bits, new bits)``, the bits as functions."""
    found: list[tuple[tuple[bool, bytes], Change]] = [((False, b""), None)] * len(pairs)  # type: ignore[list-item]

    def work(start: int, stop: int) -> None:
        for number in range(start, stop):
            chunk, before_, after_ = pairs[number]
            bits, later = before_(), after_()
            coded = host.encode_changes(chunk.kind, bits, later)
            if coded is None:
                later = later.clone()
                data, positions = host.encode_dense(chunk.kind, later), None
            else:
                data, positions = coded
            found[number] = (positions is None, data), Change.between(chunk, bits, later, positions)

    run_parts(work, len(pairs), 1)
    changes = [change for _, change in found]
    after = (before + sum(change.delta for change in changes)) % _MODULUS
    chunks = tuple(chunk for chunk, _ in found)
    head = (version, base, old.layout.digest, old.layout.numel, before, after)
    return PatchObject(*head, old.spans(), chunks), changes


def anchor(elements: Elements, version: int) -> PatchObject:
    """The object with all elements."""
    chunks = elements.chunks()
    found: list[tuple[bytes, int]] = [(b"", 0)] * len(chunks)

    def work(start: int, stop: int) -> None:
        for number in range(start, stop):
            bits = chunks[number].bits()
            found[number] = host.encode_dense(chunks[number].kind, bits), chunks[number].digest(bits)

    run_parts(work, len(chunks), 1)
    after = sum(digest for _, digest in found) % _MODULUS
    head = (version, NO_BASE, elements.layout.digest, elements.layout.numel, 0, after)
    return PatchObject(*head, elements.spans(), tuple((True, data) for data, _ in found))


def decoded(objects: Sequence[PatchObject], elements: Elements) -> list[Change]:
    """The changes that some objects, one after the other, make of elements. Nothing is written.

    Args:
        objects: at least one, all of the same spans, each for the weights that the one before it leaves.
        elements: the elements of these spans.

    Raises:
        PatchError: an object is not for these elements, or does not end with the digest that it names.
    """
    chunks = elements.chunks()
    found: list[tuple[Change, list[int]]] = [(None, [])] * len(chunks)  # type: ignore[list-item]

    def work(start: int, stop: int) -> None:
        for number in range(start, stop):
            found[number] = _decoded_chunk(objects, chunks[number], number)

    run_parts(work, len(chunks), 1)
    for index, each in enumerate(objects):
        delta = sum(deltas[index] for _, deltas in found)
        if (delta - each.after + (0 if each.is_whole else each.before)) % _MODULUS:
            raise PatchError(f"version {each.version} does not end with the digest that it names")
    return [change for change, _ in found]


def _decoded_chunk(objects: Sequence[PatchObject], chunk: Chunk, number: int) -> tuple[Change, list[int]]:
    """The change of a chunk, and what each object changes of the digest."""
    bits, deltas, steps = chunk.bits(), [], []
    begin = bits
    for each in objects:
        is_dense, data = each.chunks[number]
        if is_dense:
            new = host.decode_dense(chunk.kind, data, chunk.numel)
            before = 0 if each.is_whole else chunk.digest(bits)
            steps = [Change(chunk, None, None, new, chunk.digest(new) - before)]
        else:
            positions, values = host.decode_changes(chunk.kind, data, bits)
            steps.append(Change.at(chunk, positions, bits[positions.long()], values))
        deltas.append(steps[-1].delta)
        if len(objects) > 1 and (steps[-1].positions is None or steps[-1].positions.numel()):
            bits = steps[-1].applied(bits)
    if len(steps) == 1:
        return steps[0], deltas
    if steps[0].positions is None:
        return Change(chunk, None, None, bits, 0), deltas
    positions = torch.unique(torch.cat([each.positions for each in steps if each.positions is not None]))
    changed = (begin[positions.long()] != bits[positions.long()]).nonzero()[:, 0]
    return Change.between(chunk, begin, bits, positions[changed]), deltas


def merged(first: PatchObject, second: PatchObject, elements: Elements) -> PatchObject:
    """The patch from the elements before one patch to those after the next one."""
    changes = decoded((first, second), elements)

    def bits_of(change: Change) -> Callable[[], torch.Tensor]:
        return lambda: change.applied(change.chunk.bits())

    pairs = [(change.chunk, change.chunk.bits, bits_of(change)) for change in changes]
    return _encoded(elements, pairs, second.version, first.base, first.before)[0]
