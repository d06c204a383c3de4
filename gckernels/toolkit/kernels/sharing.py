"""Launches that units share, made of the launches of every unit.

Units that take the same kernels, with the same compile-time arguments, share them launch by launch: in a shared launch,
every program finds its unit in a table, and there the arguments of the unit's own launch. It calls the kernel of one
unit with them, so that kernel has the arguments ``(..., C: tl.constexpr, place=None)``. A kernel with a ``seed`` has
``added_ptr=None`` as its last argument: in a shared launch, the seed in the arguments is the one of the step already.
Arguments in ``COMMON`` are equal for all units of a launch, and so not in its table.

The temporaries of all units of a launch exist at the same time. So there is a limit to them, and more units take more
launches.
"""

from __future__ import annotations

import functools
import inspect
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...batch import grouped
from ..constants import Constants
from .launch import ADDED, OPTIONAL, BoundLaunch, Launch
from .launch_batch import LaunchBackend, RecordedLaunches, Repeated, RepeatedUnit, Temporaries
from .seeds import seed_of
from .tables import Table

OWN_LAUNCH = 2**22
"""Units with at least this many elements get their own launch: they keep a large GPU busy for longer than a launch
costs the host, so batching gains nothing."""
MAX_NBYTES = 2**24
"""Bytes of temporaries of all units that share launches: a large GPU keeps them in its L2 cache."""

_DTYPES = {
    **{torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64},
    **{torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64},
}
"""Triton's types."""
_EXTENTS = ("numel", "chunk_numel", "words_stride")
"""Arguments, besides offsets, on whose divisibility by 16 the width of accesses depends."""
_ROWS = ("payload_stride", "source_stride", "chunk_stride")
"""Strides of payloads, which are multiples of 16 bytes. They are int64, as their products may be large."""
_SLOTS = ("lows_words", "scales_slots", "values_slots", "payload_slots")
"""Numbers of slots that fill whole fields, up to which something is stored, besides sizes of fields in bytes."""
COMMON = {"scale": 1.0, "num_sources": 0}
"""Arguments that are equal for all units of a launch, and what they are if the kernel has none."""


class KernelBackend(LaunchBackend):
    """A back end that launches units together, kernel by kernel, except large ones."""

    def repeated(self, units: Sequence[RecordedLaunches], added: torch.Tensor | None = None) -> Repeated:
        small = [unit for unit in units if unit.numel < OWN_LAUNCH]
        groups = grouped(small, lambda unit: tuple(_compiled(launch) for launch in unit.launches))
        shared = [_SharedLaunches(part, added) for group in groups for part in _parts(group)]
        return Repeated([*shared, *(RepeatedUnit(unit, added) for unit in units if unit.numel >= OWN_LAUNCH)])


def _compiled(launch: Launch) -> tuple[Any, ...]:
    """The facts about a launch on which its compiled kernel depends, but for the addresses of temporaries."""
    arguments = tuple(
        (value.dtype, value.data_ptr() % 16 == 0)
        if isinstance(value, torch.Tensor)
        else value
        if name in COMMON
        else (_kind(launch.kernel, name, value), _is_wide(name) and value % 16 == 0)
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

    def _shared(self, launches: Sequence[Launch]) -> tuple[BoundLaunch, tuple[Any, ...]]:
        """A shared launch, and its arguments behind the memory for temporaries."""
        first = launches[0]
        columns = zip(*(launch.args for launch in launches), strict=True)
        fields = [self._field(first, name, column) for name, column in zip(first.names, columns, strict=True)]
        numbers = [values for kind, _, _, values in fields if kind not in COMMON]
        row_numel = triton.next_power_of_2(2 + len(numbers))  # then the address of a row takes no multiplication
        numbers += [[0] * len(launches)] * (row_numel - 2 - len(numbers))
        rows = [*zip(*numbers, strict=True)]
        table = Table([(launch.grid[0], math.prod(launch.grid[1:])) for launch in launches], rows, self.device)
        kinds, types, divisors = (tuple(each[index] for each in fields) for index in range(3))
        name = first.kernel.__name__.replace("_kernel", "_batch_kernel")
        arguments = Constants(
            name=name, run=first.kernel, row_numel=row_numel, kinds=kinds, types=types, divisors=divisors
        )
        common = COMMON | {name: value for name, value in zip(first.names, first.args, strict=True) if name in COMMON}
        (constants,) = (value for name, value in first.constexprs.items() if name not in OPTIONAL)
        args = *table.args, *common.values()
        shared = Launch(
            _shared_kernel,
            table.grid,
            (torch.empty(0, dtype=torch.uint8, device=self.device), *args),
            {"A": arguments, "C": constants, ADDED: self._added},
            first.num_warps,
            first.shared_maxnreg or first.maxnreg,
        )
        return BoundLaunch(shared), args

    def _field(self, launch: Launch, name: str, column: Sequence[Any]) -> tuple[str, Any, int, Sequence[int]]:
        """Kind, type and divisor of an argument, and its number in the row of every unit."""
        first = column[0]
        if isinstance(first, torch.Tensor):
            found = (self._temporaries.first_byte(tensor) for tensor in column)
            numbers = [place for place in found if place is not None]
            kind = "temporary" if len(numbers) == len(column) else "tensor"
            if kind == "tensor":
                numbers = [tensor.data_ptr() for tensor in column]
            return kind, _DTYPES[first.dtype], _divisor(numbers), numbers
        kind = _kind(launch.kernel, name, first)
        if kind == "float":
            return kind, None, 1, [struct.unpack("i", struct.pack("f", value))[0] for value in column]
        has_divisor = _is_wide(name) or name in (*_ROWS, *_SLOTS) or name.endswith("_nbytes")
        return kind, None, _divisor(column) if has_divisor else 1, column

    def use(self, memory: torch.Tensor) -> None:
        self._zeroed = self._temporaries.zeroed(memory)
        for bound, args in self._launches:
            bound.use((memory, *args))

    def run(self) -> None:
        if self._zeroed is not None:
            self._zeroed.zero_()
        for bound, _ in self._launches:
            bound()


def _kind(kernel: Any, name: str, value: float) -> str:
    if name == "seed" or name in COMMON:
        return name
    if isinstance(value, float):
        return "float"
    is_short = -(2**31) <= value < 2**31 and name not in _long_names(kernel)
    return "int32" if is_short else "int64"


@functools.cache
def _long_names(kernel: Any) -> frozenset[str]:
    """Names of the kernel's arguments that are int64 whatever their numbers."""
    named = inspect.signature(kernel.fn).parameters.items()
    return frozenset(name for name, each in named if each.annotation == "tl.int64" or name in _ROWS)


def _is_wide(name: str) -> bool:
    return name in _EXTENTS or name.endswith("_offset")


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


@triton.jit(do_not_specialize=["num_sources"], repr=lambda specialization: specialization.constants["A"].name)
def _shared_kernel(
    memory_ptr, units_ptr, table_ptr, scale, num_sources, A: tl.constexpr, C: tl.constexpr, added_ptr=None
):
    """Run the kernel of one unit, ``A.run``, with its constants ``C``, for the unit of this program.

    Args:
        memory_ptr: the memory for temporaries.
        units_ptr: int32, the unit of every program.
        table_ptr: int64, for every unit its first program, its programs per chunk and the arguments.
        scale, num_sources: the arguments of these names.
        A: the kernel, the name of this one, how long rows of the table are, and the kind, type and divisor of each
            argument.
        C: the kernel's other compile-time arguments.
        added_ptr: int64, what is added to the seed, or None.
    """
    row = table_ptr + tl.load(units_ptr + tl.program_id(0)).to(tl.int64) * A.row_numel
    index = (tl.program_id(0) - tl.load(row)).to(tl.int32)
    per_chunk = tl.load(row + 1).to(tl.int32)
    place = index % per_chunk, per_chunk, index // per_chunk
    field_ptr = row + 2
    arguments = ()
    for each in tl.static_range(len(A.kinds)):
        # Triton's tuples may grow
        if A.kinds[each] == "scale":
            arguments = arguments + (scale,)  # type: ignore[assignment]
        elif A.kinds[each] == "num_sources":
            arguments = arguments + (num_sources,)  # type: ignore[assignment]
        else:
            one = (_argument(field_ptr, memory_ptr, added_ptr, A, each),)
            arguments = arguments + one  # type: ignore[assignment]
            field_ptr += 1
    A.run(*arguments, C, place)
