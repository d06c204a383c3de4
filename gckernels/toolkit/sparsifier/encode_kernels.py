"""The kernels that encode for :mod:`~gckernels.toolkit.sparsifier`: select, place tiles, emit entries, write them.

The selection (``selection_kernels.py``) bounds the keys and counts the entries of every tile. Then one program per
chunk computes the place of each tile's entries. The emitting kernel puts the entries side by side and leaves all other
elements in the residual. ``entries_kernels.py`` writes the entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...compressor import Encoding
from ..kernels.launch import launch, temporary
from ..numeric import is_finite
from ..payload import STATUS_OK
from ..tiles import chunk_step, remaining, store_tile
from . import entries_kernels
from .keys import require_size
from .selection_kernels import NUM_WARPS, TILE, KernelSelection, keys_of, tiles_of
from .states import kernel_source, load_values

PLACED_TILE = 2048  # tiles whose places are computed at a time


@triton.jit(do_not_specialize=["tiles", "k"])
def _place_kernel(
    bounds_ptr,
    entries_ptr,  # int32 [chunks, 2, entries_stride]: numbers of entries become numbers of entries before the tile
    entries_stride,
    payload_ptr,  # uint8 [chunks, payload_stride]
    payload_stride,
    tiles,
    k,
    STATUS: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    entries_ptr += chunk * 2 * entries_stride
    offsets = tl.arange(0, TILE)
    above, between = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int64)
    while first < tiles:
        # the rows are read and written to their ends, which are multiples of 16, because the last tile is none
        inside = offsets < entries_stride - first
        counted = offsets < tiles - first
        of_above = tl.where(counted, tl.load(entries_ptr + first + offsets, mask=inside, other=0), 0)
        of_between = tl.load(entries_ptr + entries_stride + first + offsets, mask=inside, other=0)
        of_between = tl.where(counted, of_between, 0)
        tl.store(entries_ptr + first + offsets, above + tl.cumsum(of_above, 0) - of_above, mask=inside)
        before = between + tl.cumsum(of_between, 0) - of_between
        tl.store(entries_ptr + entries_stride + first + offsets, before, mask=inside)
        above += tl.sum(of_above, 0)
        between += tl.sum(of_between, 0)
        first += TILE
    room = tl.maximum(k - above, 0).to(tl.int32)
    count = tl.minimum(above, k).to(tl.int32) + tl.minimum(between, room)
    tl.store(bounds_ptr + chunk * 4 + 2, room)
    tl.store(bounds_ptr + chunk * 4 + 3, count)
    words = tl.arange(0, 4)  # header
    header_ptr = (payload_ptr + chunk * payload_stride).to(tl.pointer_type(tl.int32))
    tl.store(header_ptr + words, tl.where(words == 0, STATUS, 0))


@triton.jit(do_not_specialize=["k"])
def _emit_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,
    entries_ptr,
    entries_stride,
    indices_ptr,  # int32 [chunks, k]
    values_ptr,  # fp32 [chunks, k]
    velocities_ptr,  # fp32 [chunks, k], where there is a velocity and values are not exact
    payload_ptr,
    numel,
    chunk_numel,
    payload_stride,
    k,
    highs_words,  # padding included
    HIGHS_OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile * TILE
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile * TILE, TILE)
    offsets = tl.arange(0, TILE)
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    values, velocity, old, old_velocity = load_values(source, first, offsets, here, INPUTS, TILE)
    lower, upper = tl.load(bounds_ptr + chunk * 4), tl.load(bounds_ptr + chunk * 4 + 1)
    room = tl.load(bounds_ptr + chunk * 4 + 2)
    keys = keys_of(values)
    above = keys > upper  # not behind the last element, where the keys are 0
    between = (keys >= lower) & ~above
    ranks = tl.cumsum(above.to(tl.int32) + between.to(tl.int32) * 65536, 0)
    of_above = (ranks & 0xFFFF) + tl.load(entries_ptr + chunk * 2 * entries_stride + tile)
    of_between = (ranks >> 16) + tl.load(entries_ptr + (chunk * 2 + 1) * entries_stride + tile)
    sent = (above & (of_above <= k)) | (between & (of_between <= room))
    places = of_above + tl.minimum(of_between, room) - 1

    places += chunk * k
    tl.store(indices_ptr + places, (tile * TILE + offsets).to(tl.int32), mask=sent)
    tl.store(values_ptr + places, values, mask=sent)
    if INPUTS.residual:
        # unless values are exact, the old states are needed when the entries are written
        left = tl.where(sent, 0.0 if EXACT else old, values)
        store_tile(residual_ptr + first, offsets, tl.where(is_finite(values), left, old), here, TILE)
        if INPUTS.velocity:
            if not EXACT:
                tl.store(velocities_ptr + places, velocity, mask=sent)
            velocity = tl.where(sent, 0.0 if EXACT else old_velocity, velocity)
            store_tile(velocity_ptr + first, offsets, tl.where(is_finite(values), velocity, old_velocity), here, TILE)
    slots = tile * TILE + offsets
    if tile * TILE < highs_words:  # the string becomes zero; ones are written into it later
        highs_ptr = (payload_ptr + chunk * payload_stride + HIGHS_OFFSET).to(tl.pointer_type(tl.int32))
        tl.store(highs_ptr + slots, tl.zeros((TILE,), tl.int32), mask=slots < highs_words)


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    compressor, grad, payload, size = unit.compressor, unit.grad, unit.payload, unit.size
    require_size(compressor.name, size)
    numel, chunks, device = grad.numel(), payload.shape[0], grad.device
    k, highs = compressor.capacity(size), compressor.layout(size)["highs"]
    source, inputs = kernel_source(compressor.accumulation, grad, unit.residual)
    selection = KernelSelection(compressor, source, inputs, size, chunks, unit.seed)
    compressor.selection.launch(selection)
    bounds, entries = selection.bounds, selection.entries
    tiles, stride = tiles_of(size), payload.stride(0)
    launch(
        _place_kernel,
        (chunks,),
        *(bounds, entries, entries.stride(1), payload, stride, tiles, k),
        STATUS=STATUS_OK,
        TILE=PLACED_TILE,
        num_warps=NUM_WARPS,
    )
    indices = temporary(chunks, k, dtype=torch.int32, device=device)
    values = temporary(chunks, k, dtype=torch.float32, device=device)
    lossless = compressor.value_bits == 32
    velocities = values
    if inputs.velocity and not lossless:
        velocities = temporary(chunks, k, dtype=torch.float32, device=device)
    launch(
        _emit_kernel,
        (tiles, chunks),
        *(*source, bounds, entries, entries.stride(1), indices, values, velocities, payload),
        *(numel, chunk_step(size, chunks), stride, k, highs.nbytes // 4),
        HIGHS_OFFSET=highs.offset,
        EXACT=lossless,
        INPUTS=inputs,
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    states = (source[1], source[2]) if unit.residual is not None else None
    entries_kernels.write(compressor, indices, values, velocities, bounds, states, payload, size)
