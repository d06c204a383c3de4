"""The kernels of :mod:`~gckernels.ops.chunktopk`: a Triton program encodes or decodes one group, or several small ones
together.

``launchers.py`` launches them. ``C`` holds the compile-time arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit import bitpack
from ...toolkit.kernels.exchange import exchange_barrier
from ...toolkit.kernels.places import place_of, tile_of
from ...toolkit.linear import absmax_scale, dequantize_codes, pairwise_sum, quantize_codes, zero_below_normal
from ...toolkit.numeric import INF_BITS, bf16_bits, bf16_value, both, is_finite, to_fp32
from ...toolkit.payload import STATUS_OK
from ...toolkit.tiles import load_tile, remaining, store_tile
from .groups import NUMEL_OF_PROGRAM, as_groups, for_elements, for_rows, offsets_of
from .pack12 import load12, store12
from .selecting import select

_STATUS = tl.constexpr(STATUS_OK)


@triton.jit
def _zero_tail(field_ptr, used, nbytes):
    """Zero the bytes of a field after the first ``used``; they are fewer than 16."""
    offsets = used + tl.arange(0, 16)
    tl.store(field_ptr + offsets, tl.zeros((16,), tl.uint8), mask=offsets < nbytes)


@triton.jit(do_not_specialize=["num_groups"])
def _encode_kernel(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    list_ptr,  # int16 [chunks, programs, C.listed]
    numel,
    chunk_numel,
    payload_stride,
    num_groups,
    scales_nbytes,  # padding included, like the other two
    indices_offset,
    indices_nbytes,
    values_offset,
    values_nbytes,
    C: tl.constexpr,
    place=None,
):
    GROUP: tl.constexpr = C.group
    GROUPS: tl.constexpr = C.groups
    K: tl.constexpr = C.k
    BITS: tl.constexpr = C.bits
    program, chunk = tile_of(place)
    _, programs, _ = place_of(place)
    list_ptr += (chunk * programs + program) * C.listed
    NUMEL: tl.constexpr = GROUP * GROUPS
    # as many neighbours as threads access at a time: 16 bytes, of residuals if there are any
    RUN: tl.constexpr = 4 if C.has_residual else 128 // grad_ptr.dtype.element_ty.primitive_bitwidth
    chunk_first = chunk * chunk_numel
    grad_ptr += chunk_first + program * NUMEL
    residual_ptr += chunk_first + program * NUMEL
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), program * NUMEL, NUMEL)
    offsets = offsets_of(GROUP, GROUPS, RUN)
    values = load_tile(grad_ptr, offsets, here, NUMEL)
    if C.has_residual:
        values += load_tile(residual_ptr, offsets, here, NUMEL)
    K_PAD: tl.constexpr = 2**C.log2_k_pad
    largest = select(values, grad_ptr, residual_ptr, here, list_ptr, C)
    rows = tl.arange(0, GROUPS)[:, None]
    entries, pairs = tl.arange(0, K_PAD)[None, :], tl.arange(0, K_PAD // 2)[None, :]
    list_ptr += rows * K
    indices = tl.load(list_ptr + entries, mask=entries < K, other=0).to(tl.int32)
    even = tl.load(list_ptr + 2 * pairs, mask=pairs < K // 2, other=0).to(tl.int32) & (GROUP - 1)
    odd = tl.load(list_ptr + 2 * pairs + 1, mask=pairs < K // 2, other=0).to(tl.int32) & (GROUP - 1)
    inside = (entries < K) & (indices < here)
    sent = to_fp32(tl.load(grad_ptr + indices, mask=inside, other=0.0))
    if C.has_residual:
        old = tl.load(residual_ptr + indices, mask=inside, other=0.0)
        sent += old

    payload_ptr += chunk * payload_stride
    group = program * GROUPS + rows
    exists = group < num_groups  # a payload without elements has only a header
    largest = for_rows(largest)
    if BITS == 16:
        finite = largest < INF_BITS
        bits = bf16_bits(sent)
        values_ptr = (payload_ptr + values_offset).to(tl.pointer_type(tl.int16)) + group * K
        tl.store(values_ptr + entries, tl.where(finite, bits, 0x7FC0).to(tl.int16), mask=(entries < K) & exists)
        decoded = bf16_value(bits)
    else:
        if BITS == 2:
            total = pairwise_sum(tl.abs(sent), GROUPS, C.log2_k_pad)[:, None]
            scale = zero_below_normal(tl.div_rn(total, tl.full(total.shape, K, tl.float32)))
        else:
            scale = absmax_scale(largest.to(tl.float32, bitcast=True), BITS)
        finite = is_finite(scale)
        scale = tl.where(finite, scale, float("nan"))
        tl.store((payload_ptr + C.scales_offset).to(tl.pointer_type(tl.float32)) + group, scale, mask=exists)
        codes = tl.where(finite & (entries < K), quantize_codes(sent, scale, BITS), 0)
        packed = tl.reshape(bitpack.pack_bits(codes, GROUPS, K_PAD, BITS), (GROUPS, K_PAD * BITS // 8))
        code_bytes = tl.arange(0, K_PAD * BITS // 8)[None, :]
        values_ptr = payload_ptr + values_offset + group * (K * BITS // 8)
        tl.store(values_ptr + code_bytes, packed, mask=(code_bytes < K * BITS // 8) & exists)
        decoded = dequantize_codes(codes, scale, BITS)
    even, odd = tl.where(finite, even, 2 * pairs), tl.where(finite, odd, 2 * pairs + 1)
    store12(payload_ptr + indices_offset + group * (K // 2 * 3), pairs, even, odd, (pairs < K // 2) & exists)
    if C.has_residual:
        left = sent - decoded
        kept = tl.where(is_finite(left), left, old)
        exchange_barrier(C.waits)  # all threads have read what they add
        _store_residuals(grad_ptr, residual_ptr, offsets, values, here, tl.reshape(finite, (GROUPS,)), GROUP, GROUPS)
        exchange_barrier(C.waits)
        tl.store(residual_ptr + indices, kept, mask=inside & finite)

    if program == 0:
        words = tl.arange(0, 4)
        tl.store(payload_ptr.to(tl.pointer_type(tl.int32)) + words, tl.where(words == 0, _STATUS, 0))
    if (program + 1) * GROUPS >= num_groups:
        _zero_tail(payload_ptr + indices_offset, num_groups * (K // 2 * 3), indices_nbytes)
        if BITS < 16:
            _zero_tail(payload_ptr + C.scales_offset, num_groups * 4, scales_nbytes)
            _zero_tail(payload_ptr + values_offset, num_groups * (K * BITS // 8), values_nbytes)


@triton.jit
def _store_residuals(grad_ptr, residual_ptr, offsets, values, here, finite, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Store the sums of gradients and residuals as the residuals of groups that are ``finite [GROUPS]``."""
    if tl.min(finite.to(tl.int32), 0) > 0:
        if GROUP > NUMEL_OF_PROGRAM:
            # read again, from the cache: keeping them in registers would lower the occupancy
            PIECE: tl.constexpr = 1024
            lanes = tl.arange(0, PIECE)
            for piece in tl.static_range(0, GROUP, PIECE):
                count = tl.minimum(tl.maximum(here - piece, 0), PIECE)
                new = load_tile(grad_ptr + piece, lanes, count, PIECE)
                new += load_tile(residual_ptr + piece, lanes, count, PIECE)
                store_tile(residual_ptr + piece, lanes, new, count, PIECE)
        else:
            store_tile(residual_ptr, offsets, values, here, GROUP * GROUPS)
    elif GROUPS > 1:
        places = as_groups(offsets, GROUP, GROUPS)
        mask = (places < here) & for_elements(finite)
        tl.store(residual_ptr + places, as_groups(values, GROUP, GROUPS), mask=mask)


@triton.jit
def _load_entries(
    payload_ptr,
    groups,
    indices_offset,
    values_offset,
    exists,
    is_there,
    C: tl.constexpr,
):
    """``(indices, values, whether the group decodes to NaN)`` of groups of a payload, ``[groups, C.k_pad]``.

    They are zeros for groups that do not exist, and if the payload is not there. ``groups`` and ``exists`` are
    ``[groups, 1]``.
    """
    K: tl.constexpr = C.k
    BITS: tl.constexpr = C.bits
    entries = tl.arange(0, C.k_pad)[None, :]
    exists = both(exists, is_there)
    mask = exists & (entries < K)
    status = tl.load(payload_ptr.to(tl.pointer_type(tl.int32)), mask=is_there, other=_STATUS)
    indices_ptr = payload_ptr + indices_offset + groups * (K // 2 * 3)
    indices = load12(indices_ptr, entries, mask)
    follows = mask & (entries > 0)  # an index that repeats, or is in another order, is damaged
    repeats = follows & (load12(indices_ptr, entries - 1, follows) >= indices)
    if BITS == 16:
        values_ptr = (payload_ptr + values_offset).to(tl.pointer_type(tl.int16)) + groups * K
        bits = tl.load(values_ptr + entries, mask=mask, other=0).to(tl.int32) & 0xFFFF
        values = bf16_value(bits)
    else:
        scales_ptr = (payload_ptr + C.scales_offset).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales_ptr + groups, mask=exists, other=0.0)
        values_ptr = payload_ptr + values_offset + groups * (K * BITS // 8)
        packed = tl.load(values_ptr + entries * BITS // 8, mask=mask, other=0).to(tl.int32)
        values = dequantize_codes((packed >> (entries * BITS % 8)) & (2**BITS - 1), scale, BITS)
    return indices, values, repeats | (values != values) | (status != _STATUS)


@triton.jit
def _decode_groups(
    payload_ptr,
    out_ptr,
    scratch_ptr,  # fp32 [C.groups * C.group], of this program alone
    program,
    chunk,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
    indices_offset,
    values_offset,
    scale,
    C: tl.constexpr,
):
    """Decode and merge ``C.groups`` groups of a chunk."""
    GROUP: tl.constexpr = C.group
    GROUPS: tl.constexpr = C.groups
    K: tl.constexpr = C.k
    NUMEL: tl.constexpr = GROUP * GROUPS
    chunk_first = chunk * chunk_numel
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), program * NUMEL, NUMEL)
    rows, entries, lanes = tl.arange(0, GROUPS)[:, None], tl.arange(0, C.k_pad)[None, :], tl.arange(0, NUMEL)
    exists = rows * GROUP < here
    groups = program * GROUPS + rows
    source_ptr = payload_ptr + chunk * chunk_stride
    tl.store(scratch_ptr + lanes, tl.zeros((NUMEL,), tl.float32))
    indices, values, damaged = _load_entries(
        source_ptr, groups, indices_offset, values_offset, exists, num_sources > 0, C
    )
    exchange_barrier(C.waits)
    for source in range(num_sources):
        # load the entries of the next source while these are added
        source_ptr += source_stride
        more = source + 1 < num_sources
        next_indices, next_values, next_damaged = _load_entries(
            source_ptr, groups, indices_offset, values_offset, exists, more, C
        )
        slots = scratch_ptr + rows * GROUP + indices
        inside = exists & (entries < K) & (indices < GROUP)
        tl.store(slots, tl.load(slots, mask=inside, other=0.0) + values, mask=inside)
        exchange_barrier(C.waits)
        indices, values, damaged = next_indices, next_values, damaged | next_damaged
    is_damaged = tl.max(damaged.to(tl.int32), 1)[:, None] > 0
    out_ptr += chunk_first + program * NUMEL
    PIECE: tl.constexpr = NUMEL_OF_PROGRAM
    offsets = rows * GROUP + tl.arange(0, PIECE // GROUPS)[None, :]
    for piece in tl.static_range(0, NUMEL, PIECE):
        count = tl.minimum(tl.maximum(here - piece, 0), PIECE)
        total = tl.where(is_damaged, float("nan"), tl.load(scratch_ptr + piece + offsets)) * scale
        if C.accumulate:
            total += load_tile(out_ptr + piece, offsets, count, PIECE)
        store_tile(out_ptr + piece, offsets, total, count, PIECE)


@triton.jit(do_not_specialize=["programs", "num_sources"])
def _decode_kernel(
    payload_ptr,
    out_ptr,
    scratch_ptr,  # fp32 [chunks, at once, C.groups * C.group]
    numel,
    chunk_numel,
    programs,  # per chunk
    num_sources,
    source_stride,
    chunk_stride,
    indices_offset,
    values_offset,
    scale,
    C: tl.constexpr,
    place=None,
):
    program, chunk = tile_of(place)
    first, at_once, _ = place_of(place)
    scratch_ptr += (chunk * at_once + program) * (C.groups * C.group)
    if C.loops:
        for each in range(first, programs, at_once):
            _decode_groups(
                payload_ptr, out_ptr, scratch_ptr, tl.cast(each, tl.int64), chunk, numel, chunk_numel, num_sources,
                source_stride, chunk_stride, indices_offset, values_offset, scale, C
            )  # fmt: skip
            exchange_barrier(C.waits)  # all threads have read the scratch before the next groups clear it
    else:
        _decode_groups(
            payload_ptr, out_ptr, scratch_ptr, program, chunk, numel, chunk_numel, num_sources, source_stride,
            chunk_stride, indices_offset, values_offset, scale, C
        )  # fmt: skip
