"""Tables of the sizes of many units in many programs, for comparing programs.

A program has few extents (:class:`~.layouts.Extent`): the whole unit, or a number of its grains. The bytes of every
extent are computed once for all units. Everything else is arithmetic on whole columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gckernels.method import Method

from .layouts import Capabilities, Extent, Layout, propagate
from .sizes import WireRatio, wire_ratio
from .steps import Program
from .topology import Topology


@dataclass(frozen=True)
class SizeTable:
    """Sizes of units in programs.

    A program of ``n`` steps has ``n + 1`` states, each with a row; the programs follow one another. Every unit has a
    column.

    Attributes:
        first_rows: index of the first row of each program.
        numel: ``int64 [rows, units]``, elements of the unit that a rank holds.
        nbytes: ``int64 [rows, units]``, bytes of the unit that a rank holds, raw or encoded.
        wire_nbytes: ``float64 [rows, units]``, bytes that a rank sends in the step before the state, as a mean over all
            ranks; 0 for the first state.
    """

    first_rows: tuple[int, ...]
    numel: torch.Tensor
    nbytes: torch.Tensor
    wire_nbytes: torch.Tensor


def size_table(
    programs: Sequence[Program], numels: Sequence[int], dtype: torch.dtype, compressor: Method, topology: Topology
) -> SizeTable:
    """The sizes of all units in all programs, as :func:`~.sizes.sizes_of` and :func:`~.sizes.sent_nbytes` give them.

    Args:
        programs: programs that are valid for the compressor.
        numels: number of elements of each unit.
        dtype: dtype of the gradients.
        compressor: the method of ``Encode`` and ``Decode``.
        topology: topology of the ranks.

    Raises:
        ProgramError: a program is not valid.
        ValueError: the method refuses a unit of one of these sizes.
    """
    index = _index(tuple(programs), Capabilities.of(compressor), topology)
    units = torch.tensor(list(numels), dtype=torch.int64)
    elements = torch.stack([_elements(extent, units) for extent in index.extents])
    columns = [elements * dtype.itemsize, elements * torch.float32.itemsize]
    payloads = torch.zeros(len(index.encoded), len(units), dtype=torch.int64)
    known: dict[tuple[int, int], int] = {}  # units and extents often have the same size
    for row, (extent, round_) in enumerate(index.encoded):
        sizes = [(size, round_) for size in elements[extent].tolist()]
        for key in sizes:
            if key not in known:
                known[key] = compressor.round_nbytes(*key)
        payloads[row] = torch.tensor([known[key] for key in sizes], dtype=torch.int64)
    nbytes = torch.cat([*columns, payloads])[index.columns] * index.counts
    wire = (nbytes[index.wire_rows] * index.numerators).double() / index.denominators * index.shares
    return SizeTable(index.first_rows, elements[index.pieces], nbytes, wire)


@dataclass(frozen=True)
class _Index:
    """The part of a table that does not depend on the units.

    Attributes:
        first_rows: index of the first row of each program.
        extents: all distinct extents.
        encoded: for every kind of payload, the index of its extent, and its round.
        pieces: ``[rows]``, index of the extent that a rank holds.
        columns: ``[rows]``, index of the bytes: first of raw data of each extent in the gradients' dtype, then of raw
            data in fp32, then of ``encoded``.
        counts: ``[rows, 1]``, the number of times that these bytes are held.
        wire_rows: ``[rows]``, index of the row whose bytes are multiplied by the ratio of the bytes sent.
        numerators: ``[rows, 1]``, as in :class:`~.sizes.WireRatio`.
        denominators: ``[rows, 1]``, likewise.
        shares: ``[rows, 1]``, likewise.
    """

    first_rows: tuple[int, ...]
    extents: tuple[Extent, ...]
    encoded: tuple[tuple[int, int], ...]
    pieces: torch.Tensor
    columns: torch.Tensor
    counts: torch.Tensor
    wire_rows: torch.Tensor
    numerators: torch.Tensor
    denominators: torch.Tensor
    shares: torch.Tensor


_NOTHING = WireRatio(False, 0, 1, 1.0)


@functools.lru_cache(maxsize=64)
def _index(programs: tuple[Program, ...], capabilities: Capabilities, topology: Topology) -> _Index:
    layouts: list[Layout] = []
    first_rows: list[int] = []
    ratios: list[WireRatio] = []
    wire_rows: list[int] = []
    for program in programs:
        states = propagate(program, capabilities, topology)
        first_rows.append(len(layouts))
        ratios.append(_NOTHING)
        wire_rows.append(len(wire_rows))
        for step, before in zip(program, states[:-1], strict=True):
            ratio = wire_ratio(step, before.flow, topology)
            wire_rows.append(len(ratios) if ratio.of_result else len(ratios) - 1)
            ratios.append(ratio)
        layouts += states
    extents = tuple(dict.fromkeys(each for layout in layouts for each in (layout.piece, layout.payload)))
    number = {extent: index for index, extent in enumerate(extents)}
    encoded = dict.fromkeys((number[each.payload], each.round) for each in layouts if each.flow.encoded)
    payload_columns = {key: 2 * len(extents) + index for index, key in enumerate(encoded)}

    def column(layout: Layout) -> int:
        if layout.flow.encoded:
            return payload_columns[number[layout.payload], layout.round]
        return number[layout.piece] + (len(extents) if layout.is_fp32 else 0)

    def column_of(values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    return _Index(
        tuple(first_rows),
        extents,
        tuple(encoded),
        torch.tensor([number[each.piece] for each in layouts]),
        torch.tensor([column(each) for each in layouts]),
        column_of([each.sources * each.chunks for each in layouts]),
        torch.tensor(wire_rows),
        column_of([ratio.numerator for ratio in ratios]),
        column_of([ratio.denominator for ratio in ratios]),
        column_of([ratio.share for ratio in ratios], torch.float64),
    )


def _elements(extent: Extent, numels: torch.Tensor) -> torch.Tensor:
    """The number of elements of an extent, for every unit."""
    return extent.elements(numels)  # type: ignore[arg-type, return-value]  # its arithmetic works on tensors, too
