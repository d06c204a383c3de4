"""Layouts: the names, shapes and types of tensors, and the numbers of their elements.

The tensors of a layout stand in the order of their kinds, and of their names within a kind, and all elements are
numbered through. Tensors of a type without a kind of its own are counted in bytes. The text of a layout is JSON; its
SHA-256 is the layout's digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .errors import PatchError
from .kinds import KINDS, ElementKind, kind_of_dtype

_MAX_NUMEL = 2**47  # numbers of elements share 64 bits with patterns
_DTYPE = re.compile(r"(b?float|u?int|bool|complex)[0-9a-z_]*")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a layout.

    Attributes:
        name: its name.
        shape: its whole shape, over all ranks.
        dtype: the type in which it is sent.
        first: the number of its first element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int = 0

    @property
    def kind(self) -> ElementKind:
        """The kind of its elements."""
        return kind_of_dtype(self.dtype)

    @property
    def numel(self) -> int:
        """The number of its elements, or of bytes if these are its elements."""
        return math.prod(self.shape) * (self.dtype.itemsize // self.kind.nbytes)


@dataclass(frozen=True)
class TensorLayout:
    """Tensors in their order.

    Attributes:
        entries: the tensors.
        tied: names of further tensors, each with the name of the one whose memory it shares.
    """

    entries: tuple[TensorEntry, ...]
    tied: Mapping[str, str]

    @classmethod
    def of(cls, entries: Iterable[TensorEntry], tied: Mapping[str, str]) -> TensorLayout:
        """The layout of tensors in any order."""
        placed, first = [], 0
        for each in sorted(entries, key=lambda entry: (KINDS.index(entry.kind), entry.name)):
            placed.append(TensorEntry(each.name, each.shape, each.dtype, first))
            first += placed[-1].numel
        if first >= _MAX_NUMEL:
            raise ValueError(f"patches: there are {first:,} elements, and {_MAX_NUMEL - 1:,} are most")
        return cls(tuple(placed), dict(sorted(tied.items())))

    @classmethod
    def from_text(cls, text: bytes, digest: bytes) -> TensorLayout:
        """The layout with this text.

        Raises:
            PatchError: the text is damaged, or has another digest.
        """
        try:
            record = json.loads(text)
            entries = [_entry(*each) for each in record["tensors"]]
            tied = {str(name): str(first) for name, first in record["tied"].items()}
            layout = cls.of(entries, tied)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PatchError(f"the layout is damaged: {type(error).__name__}: {error}") from None
        names = [entry.name for entry in entries]
        if layout.digest != digest or len({*names, *tied}) < len(names) + len(tied) or not {*tied.values()} <= {*names}:
            raise PatchError("the layout is damaged")
        return layout

    @cached_property
    def text(self) -> bytes:
        """The layout as JSON."""
        tensors = [[each.name, each.shape, str(each.dtype).removeprefix("torch.")] for each in self.entries]
        return json.dumps({"tensors": tensors, "tied": self.tied}, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the text, 32 bytes."""
        return hashlib.sha256(self.text).digest()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.entries[-1].first + self.entries[-1].numel if self.entries else 0

    def difference(self, other: TensorLayout) -> str:
        """The first difference to another layout, for errors."""
        mine, its = ({each.name: (each.dtype, each.shape) for each in one.entries} for one in (self, other))
        for name in sorted({*mine, *its}):
            if mine.get(name) != its.get(name):
                here, there = (f"{one[name][0]} {[*one[name][1]]}" if name in one else "absent" for one in (mine, its))
                return f"{name} is {here} here and {there} there"
        return f"tied here: {dict(self.tied)}, there: {dict(other.tied)}"


def _entry(name: Any, shape: Any, dtype: Any) -> TensorEntry:
    """The tensor of a record, checked."""
    found = getattr(torch, dtype) if _DTYPE.fullmatch(dtype) else None
    if type(name) is not str or not isinstance(found, torch.dtype):
        raise ValueError(f"there is no tensor {name!r} of type {dtype!r}")
    if any(type(size) is not int or not 0 <= size < _MAX_NUMEL for size in shape) or len(shape) > 64:
        raise ValueError(f"{name} has no shape {shape!r}")
    return TensorEntry(name, tuple(shape), found)
