"""The kernels of ``kernels.py`` for many units in one launch.

A program looks up in a table which unit it works on and where the tensors of the unit are. It then calls the same
function as the kernels for one unit, so the results have the same bits. The units of a launch share all compile-time
arguments, such as the dtype of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from ...batch import Bound, grouped
from ...codec import SEED_MASK, Decoding, Encoding, Recoding, Work
from ..kernels.batch import (
    DTYPES,
    KernelBackend,
    Table,
    aligned,
    alignment,
    alignment_of,
    find_row,
    load_count,
    load_pointer,
    load_stride,
)
from ..kernels.launch import BoundLaunch, bind_launch
from ..kernels.seeds import seed_of
from ..tiles import chunk_step
from . import kernels
from .launches import (
    MAX_PARTIALS,
    Shape,
    decode_many_maxnreg,
    encode_maxnreg,
    kernel_constants,
    payload_shape,
    residual_form,
)
from .programs import combine_program, decode_program, encode_program, partials_program

_ENCODE_FIELDS = tl.constexpr(16)
_COMBINE_FIELDS = tl.constexpr(5)
_DECODE_FIELDS = tl.constexpr(11)


@triton.jit(do_not_specialize=["num_sources"])
def _partials_batch_kernel(
    units_ptr,
    table_ptr,  # see _Unit.row
    partials_ptr,
    num_sources,
    scale,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    Q: tl.constexpr,
):
    row, chunk, index = find_row(units_ptr, table_ptr, _ENCODE_FIELDS)
    source_ptr = load_pointer(row + 2, DTYPE, ALIGNED)
    residual_ptr = load_pointer(row + 3, tl.uint8 if Q.encoded_residual else tl.float32, ALIGNED)
    partials_ptr += tl.load(row + 5)
    numel, chunk_numel, source_stride = load_count(row + 6, NUMEL_OF), load_count(row + 7, 16), load_stride(row + 9, 16)
    num_partials, blocks = load_count(row + 10, 1), load_count(row + 11, 1)
    codes_offset, codes_nbytes = load_count(row + 13, 16), load_count(row + 14, 16)
    partials_program(
        source_ptr, residual_ptr, partials_ptr, index, chunk, numel, chunk_numel, num_partials, num_sources,
        source_stride, blocks, codes_offset, codes_nbytes, scale, Q
    )  # fmt: skip


@triton.jit
def _combine_batch_kernel(
    units_ptr,
    table_ptr,  # the last three numbers of a row: where partial and combined results begin, how many are partial
    partials_ptr,
    Q: tl.constexpr,
):
    row, chunk, _ = find_row(units_ptr, table_ptr, _COMBINE_FIELDS)
    combine_program(partials_ptr + tl.load(row + 2), partials_ptr + tl.load(row + 3), chunk, load_count(row + 4, 1), Q)


@triton.jit(do_not_specialize=["num_sources"])
def _encode_batch_kernel(
    units_ptr,
    table_ptr,  # see _Unit.row
    partials_ptr,  # shared by all units
    num_sources,
    scale,
    added_ptr,  # to what is added to every seed
    DTYPE: tl.constexpr,  # type of the gradients, or uint8 for payloads
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    Q: tl.constexpr,
):
    row, chunk, tile = find_row(units_ptr, table_ptr, _ENCODE_FIELDS)
    if Q.whole:  # backwards, as for one unit
        tile = tl.load(row + 1).to(tl.int32) - 1 - tile
    source_ptr = load_pointer(row + 2, DTYPE, ALIGNED)
    residual_ptr = load_pointer(row + 3, tl.uint8 if Q.encoded_residual else tl.float32, ALIGNED)
    payload_ptr = load_pointer(row + 4, tl.uint8, ALIGNED)
    partials_ptr += tl.load(row + 5)
    numel, chunk_numel = load_count(row + 6, NUMEL_OF), load_count(row + 7, 16)
    payload_stride, source_stride = load_stride(row + 8, 16), load_stride(row + 9, 16)
    num_partials, blocks, stats_slots = load_count(row + 10, 1), load_count(row + 11, 1), load_count(row + 12, 1)
    codes_offset, codes_nbytes = load_count(row + 13, 16), load_count(row + 14, 16)
    seed = seed_of(tl.load(row + 15), added_ptr)
    encode_program(
        source_ptr, residual_ptr, payload_ptr, partials_ptr, tile, chunk, numel, chunk_numel, payload_stride,
        num_partials, num_sources, source_stride, blocks, stats_slots, codes_offset, codes_nbytes, scale, seed, Q
    )  # fmt: skip


@triton.jit
def _decode_batch_kernel(
    units_ptr,
    table_ptr,  # see _decode
    num_sources,
    scale,
    DTYPE: tl.constexpr,  # type of the outputs
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    Q: tl.constexpr,
):
    row, chunk, tile = find_row(units_ptr, table_ptr, _DECODE_FIELDS)
    payload_ptr = load_pointer(row + 2, tl.uint8, ALIGNED)
    out_ptr = load_pointer(row + 3, DTYPE, ALIGNED)
    numel, chunk_numel = load_count(row + 4, NUMEL_OF), load_count(row + 5, 16)
    source_stride, chunk_stride, blocks = load_stride(row + 6, 16), load_stride(row + 7, 16), load_count(row + 8, 1)
    codes_offset, codes_nbytes = load_count(row + 9, 16), load_count(row + 10, 16)
    decode_program(
        payload_ptr, out_ptr, tile, chunk, numel, chunk_numel, num_sources, source_stride, chunk_stride, blocks,
        codes_offset, codes_nbytes, scale, Q
    )  # fmt: skip


class QuantizerTriton(KernelBackend):
    """The kernels of quantisers. Small units that are bound together share one launch, or two."""

    encode = staticmethod(kernels.encode)
    decode = staticmethod(kernels.decode)
    recode = staticmethod(kernels.recode)

    def encode_together(self, units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        return _encode(units[0].compressor, [_unit(unit) for unit in units], 1.0, added)

    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Work]:
        groups = grouped(units, lambda unit: (unit.out.dtype, alignment_of(unit), unit.payloads.shape[0]))
        return [_decode(units[0].compressor, group, scale, accumulate) for group in groups]

    def recode_together(self, units: Sequence[Recoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        return _encode(units[0].compressor.shard_compressor, [_merging(unit) for unit in units], scale, added)


@dataclass(frozen=True)
class _Unit:
    """One encoding: its source, which is a gradient or ``sources`` payloads, and the tensors that it writes."""

    source: torch.Tensor
    residual: torch.Tensor | None
    payload: torch.Tensor
    numel: int
    size: int
    seed: int
    sources: int = 0
    source_stride: int = 0

    @property
    def chunks(self) -> int:
        return self.payload.shape[0]

    @property
    def alignment(self) -> tuple[bool, int]:
        return alignment(self.numel, self.source, self.residual, self.payload)

    def row(self, shape: Shape, partials: int, num_partials: int) -> tuple[int, ...]:
        """The unit's row of the table, from the third field on. Its partial results begin at ``partials``."""
        target = self.source if self.residual is None else self.residual
        return (
            *(self.source.data_ptr(), target.data_ptr(), self.payload.data_ptr(), partials),
            *(self.numel, chunk_step(self.size, self.chunks), self.payload.stride(0), self.source_stride),
            *(num_partials, shape.blocks, shape.stats_slots, shape.codes_offset, shape.codes_nbytes),
            self.seed & SEED_MASK,
        )


def _unit(unit: Encoding) -> _Unit:
    return _Unit(unit.grad, unit.residual, unit.payload, unit.grad.numel(), unit.size, unit.seed)


def _merging(unit: Recoding) -> _Unit:
    sources, stride = unit.payloads.shape[0], unit.payloads.stride(0)
    return _Unit(unit.payloads, unit.residual, unit.payload[None], unit.numel, unit.size, unit.seed, sources, stride)


def _encode(quantizer: Any, units: Sequence[_Unit], scale: float, added: torch.Tensor | None) -> list[Work]:
    def common(unit: _Unit) -> Any:
        width = payload_shape(quantizer, unit.size).partials_width
        form = None if unit.residual is None else unit.residual.dtype
        return unit.source.dtype, form, unit.alignment, unit.sources, width

    return [_encode_group(quantizer, group, scale, added) for group in grouped(units, common)]


def _encode_group(quantizer: Any, units: Sequence[_Unit], scale: float, added: torch.Tensor | None) -> Work:
    first, device = units[0], units[0].payload.device
    shapes = [payload_shape(quantizer, unit.size) for unit in units]
    results = [unit.chunks * shape.terms for unit, shape in zip(units, shapes, strict=True)]
    counts = [result * shape.num_partials for result, shape in zip(results, shapes, strict=True)]
    places = [*accumulate(counts, initial=0)]
    rows = [
        unit.row(shape, place, shape.num_partials) for unit, shape, place in zip(units, shapes, places, strict=False)
    ]
    encoded, combines = rows, shapes[0].combines
    if combines:  # behind all partial results
        combined = [*accumulate(results, initial=places[-1])]
        encoded = [unit.row(shape, place, 1) for unit, shape, place in zip(units, shapes, combined, strict=False)]
    partials = torch.empty(places[-1] + sum(results), dtype=torch.float32, device=device)
    tiles = [(shape.encode_tiles, unit.chunks) for unit, shape in zip(units, shapes, strict=True)]
    table = Table(tiles, encoded, device)
    kept, merging = residual_form(first.residual), first.source.dtype == torch.uint8
    num_warps = shapes[0].encode_warps(quantizer, first.source.dtype, kept["has_residual"])
    width = shapes[0].partials_width
    common = {"DTYPE": DTYPES[first.source.dtype], **aligned(first.alignment), "num_warps": num_warps}
    constants = functools.partial(kernel_constants, quantizer, **kept, merging=merging)
    reducing: list[BoundLaunch] = []
    if shapes[0].whole:
        programs = [(shape.num_partials, unit.chunks) for unit, shape in zip(units, shapes, strict=True)]
        reduced = Table(programs, rows, device)
        arguments = reduced.grid, *reduced.args, partials, first.sources, scale
        reducing.append(bind_launch(_partials_batch_kernel, *arguments, **common, Q=constants()))
    if combines:
        numbers = zip(places, combined, (shape.num_partials for shape in shapes), strict=False)
        combining = Table([(1, unit.chunks) for unit in units], [*numbers], device)
        of_all = kernel_constants(quantizer, partials_width=MAX_PARTIALS)
        reducing.append(bind_launch(_combine_batch_kernel, combining.grid, *combining.args, partials, Q=of_all))
    encoding = bind_launch(
        *(_encode_batch_kernel, table.grid, *table.args, partials, first.sources, scale, added),
        maxnreg=encode_maxnreg(quantizer, kept["has_residual"], merging),
        **common,
        Q=constants(partials_width=width),
    )

    return Bound([*reducing, encoding]) if reducing else encoding


def _decode(quantizer: Any, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work:
    first, device = units[0], units[0].out.device
    shapes = [payload_shape(quantizer, unit.size) for unit in units]
    rows = [
        (
            *(unit.payloads.data_ptr(), unit.out.data_ptr(), unit.out.numel()),
            *(chunk_step(unit.size, unit.payloads.shape[1]), unit.payloads.stride(0), unit.payloads.stride(1)),
            *(shape.blocks, shape.codes_offset, shape.codes_nbytes),
        )
        for unit, shape in zip(units, shapes, strict=True)
    ]
    tiles = [(shape.decode_tiles, unit.payloads.shape[1]) for unit, shape in zip(units, shapes, strict=True)]
    table = Table(tiles, rows, device)
    return bind_launch(
        *(_decode_batch_kernel, table.grid, *table.args, first.payloads.shape[0], scale),
        DTYPE=DTYPES[first.out.dtype],
        **aligned(alignment_of(first)),
        Q=kernel_constants(quantizer, adds_to_out=accumulate),
        num_warps=shapes[0].decode_warps,
        maxnreg=decode_many_maxnreg(quantizer, first.payloads.shape[0]),
    )
