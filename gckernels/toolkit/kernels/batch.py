"""One launch for many units: a table on the device tells every program which unit it works on, and where that is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from ...batch import Bound, Seeded, Unseeded
from ...compressor import Decoding, Encoding, Recoding
from .launch_batch import LaunchBatch
from .tables import to_device

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}

T = TypeVar("T")

OWN_LAUNCH = 2**22
"""Elements from which on a unit is launched by itself: it fills a large GPU with programs, of 2048 elements each, and
takes that longer than a launch takes the host, so there is nothing to gain from doing without its own."""


class KernelBatch(LaunchBatch):
    """Units that are launched together, those that have in common what a kernel is compiled for; large ones are not.

    A subclass says how, in methods that get at least one unit and return a function for every launch.
    """

    def bind_encodes(self, units: Sequence[Encoding], scale: float) -> Seeded:
        small, large = _parted(units, lambda unit: unit.size * unit.payload.shape[0])
        works = self.encode_together(small, scale) if small else []
        return Bound([*works, super().bind_encodes(large, scale)] if large else works)

    def bind_decodes(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Unseeded:
        small, large = _parted(units, lambda unit: unit.size * unit.payloads.shape[1])
        works = self.decode_together(small, scale, accumulate) if small else []
        return Bound([*works, super().bind_decodes(large, scale, accumulate)] if large else works)

    def bind_recodes(self, units: Sequence[Recoding], scale: float) -> Seeded:
        small, large = _parted(units, lambda unit: unit.size)
        works = self.recode_together(small, scale) if small else []
        return Bound([*works, super().bind_recodes(large, scale)] if large else works)

    @abstractmethod
    def encode_together(self, units: Sequence[Encoding], scale: float) -> list[Seeded]: ...

    @abstractmethod
    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Unseeded]: ...

    @abstractmethod
    def recode_together(self, units: Sequence[Recoding], scale: float) -> list[Seeded]: ...


def _parted(units: Sequence[T], room: Callable[[T], int]) -> tuple[list[T], list[T]]:
    """Small ones and large ones, by the elements that their payloads have room for."""
    small = [unit for unit in units if room(unit) < OWN_LAUNCH]
    return small, [unit for unit in units if room(unit) >= OWN_LAUNCH]


class Table:
    """The units of a launch: ``args``, the first two arguments of the kernel (see :func:`find_row`), and ``grid``.

    Args:
        programs: of each unit: programs of a chunk, and chunks.
        rows: of each unit, the fields that follow.
        device: of the launch.
    """

    def __init__(self, programs: Sequence[tuple[int, int]], rows: Sequence[Any], device: torch.device) -> None:
        totals = [per_chunk * chunks for per_chunk, chunks in programs]
        firsts = accumulate(totals, initial=0)
        full = [(first, per_chunk, *row) for first, (per_chunk, _), row in zip(firsts, programs, rows, strict=False)]
        units = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(totals))
        self.args = to_device(units, device), to_device(torch.tensor(full, dtype=torch.int64), device)
        self.grid = (sum(totals),)


def signed(seed: int) -> int:
    """A 64-bit seed as the int64 of the same bits."""
    return (seed + 2**63) % 2**64 - 2**63


def alignment(numel: int, *tensors: torch.Tensor | None) -> tuple[bool, int]:
    """Whether all addresses are multiples of 16 bytes; and 16, where it divides the number of elements, or 1."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return all(address % 16 == 0 for address in addresses), 1 if numel % 16 else 16


def alignment_of(unit: Decoding) -> tuple[bool, int]:
    return alignment(unit.out.numel(), unit.payloads, unit.out)


def aligned(found: tuple[bool, int]) -> dict[str, Any]:
    """What :func:`alignment` has found, for a kernel: as much as a launch by itself infers of its arguments."""
    return dict(zip(("ALIGNED", "NUMEL_OF"), found, strict=True))


@triton.jit
def find_row(units_ptr, table_ptr, FIELDS: tl.constexpr):
    """The row of this program's unit; which chunk of it is this program's, and which program of the chunk it is, int32.

    ``units_ptr``, int32, has the unit of every program; ``table_ptr``, int64, ``FIELDS`` numbers of every unit: its
    first program, how many each of its chunks has, and others.
    """
    row = table_ptr + tl.load(units_ptr + tl.program_id(0)).to(tl.int64) * FIELDS
    program = (tl.program_id(0) - tl.load(row)).to(tl.int32)
    per_chunk = tl.load(row + 1).to(tl.int32)
    return row, program // per_chunk, program % per_chunk


@triton.jit
def load_pointer(field_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to ``DTYPE``; ``ALIGNED``: to a multiple of 16 bytes, which loads and stores of 16 bytes need."""
    pointer = tl.load(field_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # said of the pointer: what is known of a number is forgotten when it becomes one
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_stride(field_ptr, OF: tl.constexpr):
    """A number that ``OF`` divides, int64."""
    return tl.multiple_of(tl.load(field_ptr), OF)


@triton.jit
def load_count(field_ptr, OF: tl.constexpr):
    """A number of elements, slots or bytes that ``OF`` divides, int32: units with larger ones are not in a table."""
    return tl.multiple_of(tl.load(field_ptr).to(tl.int32), OF)
