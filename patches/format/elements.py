"""Elements of a layout in tensors: reading their bits, chunk by chunk, and writing them.

Spans of elements that a tensor, or a shard of one, holds are *pieces*. The elements of a patch are pieces in the order
of their numbers, cut into chunks of one kind, which run over the borders of pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import host
from .errors import PatchError
from .kinds import ElementKind
from .layout import TensorEntry, TensorLayout
from .reference import CHUNK

Span = tuple[int, int]
"""The number of the first element, and the number of elements."""


@dataclass(frozen=True)
class Piece:
    """Elements in a row that one tensor holds.

    Attributes:
        entry: the tensor in the layout.
        first: the number of the first element in the layout.
        flat: the tensor's elements, a vector: as bits, or in another type, from which they are cast.
    """

    entry: TensorEntry
    first: int
    flat: torch.Tensor

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.flat.numel()

    def bits(self, start: int, stop: int) -> torch.Tensor:
        """The bits of elements ``start`` to ``stop`` of the piece, on the CPU; a view if they are there."""
        return _as_bits(self.flat[start:stop], self.entry).cpu()

    def part(self, first: int, numel: int) -> Piece:
        """The elements with the numbers from ``first`` on."""
        return Piece(self.entry, first, self.flat[first - self.first : first - self.first + numel])


@dataclass(frozen=True)
class Chunk:
    """Up to 2**20 elements of one kind: ``(piece, start, stop)`` of its parts."""

    kind: ElementKind
    parts: tuple[tuple[Piece, int, int], ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(stop - start for _, start, stop in self.parts)

    def bits(self) -> torch.Tensor:
        """The bits of all elements, on the CPU; a view of them if one tensor holds them there."""
        parts = [piece.bits(start, stop) for piece, start, stop in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def cut(self, positions: torch.Tensor | None) -> Iterator[tuple[Piece, int, int, slice]]:
        """``(piece, shift, first, selected)`` of each part with some of the positions, which ascend, or of every part.

        ``positions[selected] + shift`` are places in the piece, and ``positions[selected] + first`` numbers in the
        layout. Without positions ``selected`` are those of the chunk.
        """
        begin = 0
        for piece, start, stop in self.parts:
            end = begin + stop - start
            selected = slice(begin, end)
            if positions is not None:
                selected = slice(*torch.searchsorted(positions, positions.new_tensor([begin, end])).tolist())
            if selected.start < selected.stop:
                yield piece, start - begin, piece.first + start - begin, selected
            begin = end

    def digest(self, bits: torch.Tensor, positions: torch.Tensor | None = None) -> int:
        """The digest of bits of this chunk: of all elements, or of those at some positions."""
        if positions is None:
            return sum(host.digest_of(bits[at], first + at.start) for _, _, first, at in self.cut(None))
        return sum(host.digest_at(positions[at], bits[at], first) for _, _, first, at in self.cut(positions))


@dataclass(frozen=True)
class Elements:
    """Pieces of a layout in ascending order, without overlap.

    Attributes:
        layout: the layout.
        pieces: the pieces.
        copies: tensors that are not contiguous, with vectors of pieces in their place.
    """

    layout: TensorLayout
    pieces: tuple[Piece, ...]
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = field(default=())

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(piece.numel for piece in self.pieces)

    def spans(self) -> tuple[Span, ...]:
        """The spans of the pieces; those that touch are one."""
        spans: list[Span] = []
        for piece in self.pieces:
            if spans and sum(spans[-1]) == piece.first:
                spans[-1] = (spans[-1][0], spans[-1][1] + piece.numel)
            elif piece.numel:
                spans.append((piece.first, piece.numel))
        return tuple(spans)

    def within(self, spans: Sequence[Span]) -> Elements:
        """The elements of some spans.

        Raises:
            PatchError: some of them are not here.
        """
        pieces: list[Piece] = []
        remaining = iter(self.pieces)
        piece = next(remaining, None)
        for first, numel in spans:
            stop = first + numel
            while first < stop:
                while piece is not None and piece.first + piece.numel <= first:
                    piece = next(remaining, None)
                if piece is None or first < piece.first:
                    raise PatchError(f"element {first:,} is not among the tensors")
                pieces.append(piece.part(first, min(stop, piece.first + piece.numel) - first))
                first += pieces[-1].numel
        return Elements(self.layout, tuple(pieces))

    def chunks(self) -> list[Chunk]:
        """The chunks of all elements."""
        chunks: list[Chunk] = []
        parts: list[tuple[Piece, int, int]] = []
        room, kind = 0, None
        for piece in self.pieces:
            start = 0
            while start < piece.numel:
                if kind is not piece.entry.kind or not room:
                    if parts and kind is not None:
                        chunks.append(Chunk(kind, tuple(parts)))
                    parts, room, kind = [], CHUNK, piece.entry.kind
                stop = min(piece.numel, start + room)
                parts.append((piece, start, stop))
                room, start = room - (stop - start), stop
        if parts and kind is not None:
            chunks.append(Chunk(kind, tuple(parts)))
        return chunks

    def digest(self) -> int:
        """The digest of all elements."""
        return sum(chunk.digest(chunk.bits()) for chunk in self.chunks()) % 2**64

    def finish(self) -> None:
        """Bring what was written into vectors of copies to their tensors."""
        for tensor, vector in self.copies:
            tensor.detach().copy_(vector.view(tensor.dtype).view(tensor.shape))


def _as_bits(values: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Values as bits; in another type than the entry's, they are cast."""
    bits = entry.kind.bits_dtype
    if values.dtype == bits and entry.dtype != bits:
        return values  # as bits already
    return values.to(entry.dtype).view(bits)


def elements_of(caller: str, layout: TensorLayout, find: Callable[[str], torch.Tensor]) -> Elements:
    """The elements of a layout in whole tensors, to be read or written.

    Args:
        caller: name of the calling function, for errors.
        layout: the layout.
        find: returns the tensor of a name.

    Raises:
        ValueError: a tensor has another shape or type, lies where another one lies, or is not dense.
    """
    pieces, copies, ranges = [], [], []
    for entry in layout.entries:
        tensor = find(entry.name)
        if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            given = f"{tensor.dtype} {[*tensor.shape]}"
            raise ValueError(f"{caller}: {entry.name} is {given}, and {entry.dtype} {[*entry.shape]} is expected")
        flat = vector_of(caller, entry.name, tensor)
        if not tensor.is_contiguous():
            copies.append((tensor, flat))
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            ranges.append((str(tensor.device), begin, begin + (last + 1) * tensor.element_size(), entry.name))
        pieces.append(Piece(entry, entry.first, flat.view(entry.kind.bits_dtype)))
    ranges.sort()
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(ranges):
        if device == other_device and begin < end:
            raise ValueError(f"{caller}: {name} and {other} lie in ranges of memory that overlap")
    for name, first in layout.tied.items():
        if find(name).data_ptr() != find(first).data_ptr() or find(name).stride() != find(first).stride():
            raise ValueError(f"{caller}: {name} is not the same memory as {first}, and is where they come from")
    return Elements(layout, tuple(pieces), tuple(copies))


def vector_of(caller: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as a vector; a copy if it is not contiguous.

    Raises:
        ValueError: it is not a dense tensor, or has several elements in one place.
    """
    if hasattr(tensor, "to_local"):
        raise ValueError(f"{caller}: {name} is a shard, and whole tensors are expected")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"{caller}: {name} must be a dense tensor with values, got {tensor.layout} on {tensor.device}")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{caller}: {name} is expanded: several of its elements are one number in memory")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1)


def described(caller: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> TensorLayout:
    """The layout of tensors.

    Args:
        caller: name of the calling function, for errors.
        tensors: the tensors by name. Several of one memory and shape are one tensor, that of the first name.
        dtype: the type of fp32 and fp64 tensors; ``None`` for their own.

    Raises:
        TypeError: something is no tensor.
    """
    entries: list[TensorEntry] = []
    tied: dict[str, str] = {}
    found: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor) or type(name) is not str:
            raise TypeError(f"{caller}: tensors must be tensors by name, got {type(tensor).__name__} for {name!r}")
        memory = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), _identity(tensor))
        if tensor.numel() and found.setdefault(memory, name) != name:
            tied[name] = found[memory]
            continue
        is_wide = dtype is not None and tensor.dtype in (torch.float32, torch.float64)
        entries.append(TensorEntry(name, tuple(tensor.shape), dtype if is_wide and dtype else tensor.dtype))
    return TensorLayout.of(entries, tied)


def _identity(tensor: torch.Tensor) -> int:
    """A number that tensors of one memory share: its address, or of a shard, which may be empty, the object's."""
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr()
