"""Launches that units share, made of the launches of every unit.

Units that take the same kernels, with the same compile-time arguments, share them launch by launch: in a shared launch,
every program finds its unit in a table, and there the arguments of the unit's own launch. It calls the kernel of one
unit with them, so that kernel has the arguments ``(..., C: tl.constexpr, place=None)``. A kernel with a ``seed`` has
``added_ptr=None`` as its last argument: in a shared launch, the seed in the arguments is the one of the step already.

The temporaries of all units of a launch exist at the same time. So there is a limit to them, and more units take more
launches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...batch import grouped
from ...codec import Decoding, Encoding, Recoding, Work
from ..constants import Constants
from .batch import DTYPES, KernelBackend, Table, find_row
from .launch import BoundLaunch, Launch
from .launch_batch import RecordedLaunches, Repeated, Temporaries
from .seeds import seed_of

MAX_NBYTES = 2**24
"""Bytes of temporaries of all units that share launches: a large GPU keeps them in its L2 cache."""

_TYPES = DTYPES | {torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64, torch.float64: tl.float64}
_STRIDES = ("numel", "chunk_numel", "payload_stride", "source_stride", "chunk_stride", "words_stride")
"""Arguments, besides offsets, on whose divisibility by 16 the width of accesses depends."""
_LIMITS = ("lows_words", "scales_slots", "values_slots")
"""Numbers of slots that fill whole fields, up to which something is stored. They divide by 4 or more."""


class SharingBackend(KernelBackend):
    """A back end whose units share the launches of ``encode``, ``decode`` and ``recode``, kernel by kernel."""

    def encode_together(self, units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        return [self._repeated([self.record_encode(unit, scale) for unit in units], added)]

    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Work]:
        return [self._repeated([self.record_decode(unit, scale, accumulate) for unit in units])]

    def recode_together(self, units: Sequence[Recoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        return [self._repeated([self.record_recode(unit, scale) for unit in units], added)]

    def _repeated(self, units: Sequence[RecordedLaunches], added: torch.Tensor | None = None) -> Repeated:
        groups = grouped(units, lambda unit: tuple(_compiled(launch) for launch in unit.launches))
        parts = [part for group in groups for part in _parts(group)]
        return Repeated([_SharedLaunches(part, added) for part in parts])


def _compiled(launch: Launch) -> tuple[Any, ...]:
    """The facts about a launch on which its compiled kernel depends, but for the addresses of temporaries."""
    arguments = tuple(
        (value.dtype, value.data_ptr() % 16 == 0)
        if isinstance(value, torch.Tensor)
        else (_kind(name, value), _is_wide(name) and value % 16 == 0)
        for name, value in zip(launch.names, launch.args, strict=True)
    )
    return launch.kernel, tuple(sorted(launch.constexprs.items())), launch.num_warps, launch.maxnreg, arguments


def _parts(units: Sequence[RecordedLaunches]) -> Iterator[list[RecordedLaunches]]:
    """Units that may share launches, as many at a time as the limit of their temporaries allows."""
    part: list[RecordedLaunches] = []
    nbytes = 0
    for unit in units:
        of_unit = Temporaries(unit.temporaries).nbytes
        if part and nbytes + of_unit > MAX_NBYTES:
            yield part
            part, nbytes = [], 0
        part.append(unit)
        nbytes += of_unit
    yield part


class _SharedLaunches:
    """The launches that units share, whose seeds are offset by ``added``."""

    def __init__(self, units: Sequence[RecordedLaunches], added: torch.Tensor | None) -> None:
        self._added = added
        self._temporaries = Temporaries(each for unit in units for each in unit.temporaries)
        self.nbytes, self.device = self._temporaries.nbytes, units[0].device
        self._zeroed: torch.Tensor | None = None
        self._launches = [self._shared(launches) for launches in zip(*(unit.launches for unit in units), strict=True)]

    def _shared(self, launches: Sequence[Launch]) -> tuple[BoundLaunch, Table]:
        first = launches[0]
        columns = zip(*(launch.args for launch in launches), strict=True)
        fields = [self._field(name, column) for name, column in zip(first.names, columns, strict=True)]
        rows = [*zip(*(values for _, _, _, values in fields), strict=True)]
        table = Table([(launch.grid[0], math.prod(launch.grid[1:])) for launch in launches], rows, self.device)
        kinds, types, divisors = (tuple(each[index] for each in fields) for index in range(3))
        name = first.kernel.__name__.replace("_kernel", "_batch_kernel")
        arguments = Constants(
            name=name, run=first.kernel, count=len(kinds), kinds=kinds, types=types, divisors=divisors
        )
        args = *table.args, torch.empty(0, dtype=torch.uint8, device=self.device), self._added
        constexprs = {"A": arguments, "C": first.constexprs["C"]}
        shared = Launch(_shared_kernel, table.grid, args, constexprs, first.num_warps, first.maxnreg)
        return BoundLaunch(shared), table

    def _field(self, name: str, column: Sequence[Any]) -> tuple[str, Any, int, Sequence[int]]:
        """Kind, type and divisor of an argument, and its number in the row of every unit."""
        first = column[0]
        if isinstance(first, torch.Tensor):
            found = (self._temporaries.first_byte(tensor) for tensor in column)
            numbers = [place for place in found if place is not None]
            kind = "temporary" if len(numbers) == len(column) else "tensor"
            if kind == "tensor":
                numbers = [tensor.data_ptr() for tensor in column]
            return kind, _TYPES[first.dtype], _divisor(numbers), numbers
        kind = _kind(name, first)
        if kind == "float":
            return kind, None, 1, [struct.unpack("i", struct.pack("f", value))[0] for value in column]
        return kind, None, _divisor(column) if _is_wide(name) or name in _LIMITS else 1, column

    def use(self, memory: torch.Tensor) -> None:
        self._zeroed = self._temporaries.zeroed(memory)
        for bound, table in self._launches:
            bound.use((*table.args, memory, self._added))

    def run(self) -> None:
        if self._zeroed is not None:
            self._zeroed.zero_()
        for bound, _ in self._launches:
            bound()


def _kind(name: str, value: float) -> str:
    if name == "seed":
        return name
    if isinstance(value, float):
        return "float"
    return "int32" if -(2**31) <= value < 2**31 else "int64"


def _is_wide(name: str) -> bool:
    return name in _STRIDES or name.endswith("_offset")


def _divisor(numbers: Sequence[int]) -> int:
    """The largest divisor of all ``numbers`` that accesses of 16 bytes may need."""
    return math.gcd(16, *numbers)


@triton.jit
def _argument(field_ptr, memory_ptr, added_ptr, A: tl.constexpr, INDEX: tl.constexpr):
    KIND: tl.constexpr = A.kinds[INDEX]
    TYPE: tl.constexpr = A.types[INDEX]
    OF: tl.constexpr = A.divisors[INDEX]
    if KIND == "tensor":
        return tl.multiple_of(tl.load(field_ptr).to(tl.pointer_type(TYPE)), OF)
    elif KIND == "temporary":
        return tl.multiple_of((memory_ptr + tl.load(field_ptr)).to(tl.pointer_type(TYPE)), OF)
    elif KIND == "seed":
        return seed_of(tl.load(field_ptr), added_ptr)
    elif KIND == "float":
        return tl.load(field_ptr).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == "int32":
        return tl.multiple_of(tl.load(field_ptr).to(tl.int32), OF)
    else:
        return tl.multiple_of(tl.load(field_ptr), OF)


@triton.jit(repr=lambda specialization: specialization.constants["A"].name)
def _shared_kernel(units_ptr, table_ptr, memory_ptr, added_ptr, A: tl.constexpr, C: tl.constexpr):
    """Run the kernel of one unit, ``A.run``, with its constants ``C``, for the unit of this program.

    Args:
        units_ptr: int32, the unit of every program.
        table_ptr: int64, for every unit its first program, its programs per chunk and the arguments.
        memory_ptr: the memory for temporaries.
        added_ptr: int64, what is added to the seed, or None.
        A: the kernel, the name of this one, how many arguments the kernel has, and the kind, type and divisor of each.
        C: the kernel's other compile-time arguments.
    """
    COUNT: tl.constexpr = A.count
    row, chunk, program = find_row(units_ptr, table_ptr, 2 + COUNT)
    arguments = ()
    for index in tl.static_range(COUNT):
        one = (_argument(row + 2 + index, memory_ptr, added_ptr, A, index),)
        arguments = arguments + one  # type: ignore[assignment]  # Triton's tuples may grow
    place = program, tl.load(row + 1).to(tl.int32), chunk.to(tl.int64)
    A.run(*arguments, C, place)
