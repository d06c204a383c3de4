"""Sizes of many units in many programs at once, for those who compare programs.

Units go through a program in a few extents (:class:`~.layouts.Extent`): as they are, or so many grains of them. So the
bytes of every extent are worked out once for all units, and everything else is a product of whole columns.
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
    """The sizes of units in programs: a row for every state of every program, one after the other, a column for every
    unit. A program of ``n`` steps has ``n + 1`` states.

    Attributes:
        first_rows: the first row of each program.
        numel: ``int64 [rows, units]``, elements that a rank holds of the unit.
        nbytes: ``int64 [rows, units]``, bytes that a rank holds of it, raw or encoded.
        wire_nbytes: ``float64 [rows, units]``, bytes that a rank sends for the step that leads to the state, as a mean
            over all ranks; 0 for the first state.
    """

    first_rows: tuple[int, ...]
    numel: torch.Tensor
    nbytes: torch.Tensor
    wire_nbytes: torch.Tensor


def size_table(
    programs: Sequence[Program], numels: Sequence[int], dtype: torch.dtype, compressor: Method, topology: Topology
) -> SizeTable:
    """The sizes of all units in all programs, as :func:`~.sizes.sizes_of` and :func:`~.sizes.sent_nbytes` have them.

    Args:
        programs: valid ones for the compressor.
        numels: elements of each unit.
        dtype: of the gradients.
        compressor: what ``Encode`` and ``Decode`` use.
        topology: of the ranks.

    Raises:
        ProgramError: a program is not valid.
        ValueError: the compressor refuses a unit of one of these sizes.
    """
    index = _index(tuple(programs), Capabilities.of(compressor), topology)
    units = torch.tensor(list(numels), dtype=torch.int64)
    elements = torch.stack([_elements(extent, units) for extent in index.extents])
    columns = [elements * dtype.itemsize, elements * torch.float32.itemsize]
    payloads = torch.zeros(len(index.encoded), len(units), dtype=torch.int64)
    known: dict[tuple[int, int], int] = {}  # one size is often that of several units and extents
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
    """Where the rows of a table come from, whatever the units are.

    Attributes:
        first_rows: the first row of each program.
        extents: all that there are.
        encoded: the extents that payloads are laid out for, as indices, with the round of the payload.
        pieces: of each row, the index of its extent.
        columns: of each row, raw data of its extent in the gradient's dtype or in fp32, or one of ``encoded``.
        counts: of each row ``[rows, 1]``, how many of these.
        wire_rows: of each row, the row of the bytes that are sent, times the ratio.
        numerators, denominators, shares: of each row ``[rows, 1]``, as of :class:`~.sizes.WireRatio`.
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

    def upright(values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    return _Index(
        tuple(first_rows),
        extents,
        tuple(encoded),
        torch.tensor([number[each.piece] for each in layouts]),
        torch.tensor([column(each) for each in layouts]),
        upright([each.sources * each.chunks for each in layouts]),
        torch.tensor(wire_rows),
        upright([ratio.numerator for ratio in ratios]),
        upright([ratio.denominator for ratio in ratios]),
        upright([ratio.share for ratio in ratios], torch.float64),
    )


def _elements(extent: Extent, numels: torch.Tensor) -> torch.Tensor:
    """The elements of the extent, for every unit."""
    return extent.elements(numels)  # type: ignore[arg-type, return-value]  # arithmetic that tensors have, too
