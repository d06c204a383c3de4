"""One launch for many units: a table on the device gives every Triton program its unit and the unit's addresses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from ...batch import Bound
from ...codec import Decoding, Encoding, Recoding, Work
from .launch_batch import LaunchBackend
from .tables import to_device

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}

T = TypeVar("T")

OWN_LAUNCH = 2**22
"""Units with at least this many elements get their own launch: they keep a large GPU busy for longer than a launch
costs the host, so batching gains nothing."""


class KernelBackend(LaunchBackend):
    """A back end that launches units together if they share a compiled kernel; large units are launched separately.

    Subclasses implement methods that get at least one unit and return a function for every launch.
    """

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        small, large = _parted(units, lambda unit: unit.size * unit.payload.shape[0])
        works = self.encode_together(small, scale, added) if small else []
        return Bound([*works, super().bind_encodes(large, scale, added)] if large else works)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        small, large = _parted(units, lambda unit: unit.size * unit.payloads.shape[1])
        works = self.decode_together(small, scale, accumulate) if small else []
        return Bound([*works, super().bind_decodes(large, scale, accumulate)] if large else works)

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        small, large = _parted(units, lambda unit: unit.size)
        works = self.recode_together(small, scale, added) if small else []
        return Bound([*works, super().bind_recodes(large, scale, added)] if large else works)

    @abstractmethod
    def encode_together(self, units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> list[Work]: ...

    @abstractmethod
    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Work]: ...

    @abstractmethod
    def recode_together(self, units: Sequence[Recoding], scale: float, added: torch.Tensor | None) -> list[Work]: ...


def _parted(units: Sequence[T], room: Callable[[T], int]) -> tuple[list[T], list[T]]:
    """Small units and large units; ``room`` returns the number of elements that a unit's payloads have room for."""
    small = [unit for unit in units if room(unit) < OWN_LAUNCH]
    return small, [unit for unit in units if room(unit) >= OWN_LAUNCH]


class Table:
    """The table of a launch's units.

    Args:
        programs: for each unit, the number of Triton programs per chunk, and the number of chunks.
        rows: for each unit, the further fields of its row.
        device: device of the launch.

    Attributes:
        args: the first two arguments of the kernel, see :func:`find_row`.
        grid: the grid of the launch.
    """

    def __init__(self, programs: Sequence[tuple[int, int]], rows: Sequence[Any], device: torch.device) -> None:
        totals = [per_chunk * chunks for per_chunk, chunks in programs]
        firsts = accumulate(totals, initial=0)
        full = [(first, per_chunk, *row) for first, (per_chunk, _), row in zip(firsts, programs, rows, strict=False)]
        units = torch.arange(len(rows), dtype=torch.int32, device="cpu")
        units = units.repeat_interleave(torch.tensor(totals, dtype=torch.int64, device="cpu"))
        self.args = to_device(units, device), to_device(torch.tensor(full, dtype=torch.int64, device="cpu"), device)
        self.grid = (sum(totals),)


def alignment(numel: int, *tensors: torch.Tensor | None) -> tuple[bool, int]:
    """Whether all addresses are multiples of 16 bytes; and 16 if it divides ``numel``, otherwise 1."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return all(address % 16 == 0 for address in addresses), 1 if numel % 16 else 16


def alignment_of(unit: Decoding) -> tuple[bool, int]:
    return alignment(unit.out.numel(), unit.payloads, unit.out)


def aligned(found: tuple[bool, int]) -> dict[str, Any]:
    """The result of :func:`alignment` as constexprs, the facts that a separate launch infers from its arguments."""
    return dict(zip(("ALIGNED", "NUMEL_OF"), found, strict=True))


@triton.jit
def find_row(units_ptr, table_ptr, FIELDS: tl.constexpr):
    """Pointer to the row of this program's unit, the chunk, and the number of this program in the chunk, both int32.

    ``units_ptr``, int32, has the unit of every program. ``table_ptr``, int64, has ``FIELDS`` numbers for every unit:
    its first program, its number of programs per chunk, and others.
    """
    return find_row_of(tl.program_id(0), units_ptr, table_ptr, FIELDS)


@triton.jit
def find_place(units_ptr, table_ptr, FIELDS: tl.constexpr):
    """The same pointer as :func:`find_row`, and this program's place (``places.py``), all int32."""
    row, chunk, program = find_row(units_ptr, table_ptr, FIELDS)
    return row, (program, tl.load(row + 1).to(tl.int32), chunk)


@triton.jit
def find_row_of(program, units_ptr, table_ptr, FIELDS: tl.constexpr):
    """The same as :func:`find_row`, of another program."""
    row = table_ptr + tl.load(units_ptr + program).to(tl.int64) * FIELDS
    index = (program - tl.load(row)).to(tl.int32)
    per_chunk = tl.load(row + 1).to(tl.int32)
    return row, index // per_chunk, index % per_chunk


@triton.jit
def load_pointer(field_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to ``DTYPE`` in a field; if ``ALIGNED``, a multiple of 16 bytes, as wide loads and stores need."""
    pointer = tl.load(field_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # a hint on the number would be lost in the cast to a pointer
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_stride(field_ptr, OF: tl.constexpr):
    """The int64 number in a field, a multiple of ``OF``."""
    return tl.multiple_of(tl.load(field_ptr), OF)


@triton.jit
def load_count(field_ptr, OF: tl.constexpr):
    """The number of elements, slots or bytes in a field as int32, a multiple of ``OF``; larger units have no table."""
    return tl.multiple_of(tl.load(field_ptr).to(tl.int32), OF)
