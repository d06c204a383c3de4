"""The kernels that write entries (:mod:`~gckernels.toolkit.sparsifier.entries`), and that find tiles in their strings.

An encoder has put the entries side by side. A program writes 1024 of them: their low bits, scales and values, and
atomically their ones into the string, which was zero. A decoder finds the entries of a tile by counting the zeros of
the string: one kernel counts them in every segment of the string, another writes where every tile begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import bitpack
from ..constants import constants
from ..kernels.launch import launch, temporary
from ..kernels.places import place_of
from ..linear import absmax_scale, dequantize_codes, pairwise_sum, quantize_codes, zero_below_normal
from ..numeric import bf16_bits, bf16_value, is_finite
from ..payload import HEADER_NBYTES
from ..tiles import chunk_step
from .entries import BLOCK, SPAN

ROWS, NUM_WARPS = 16, 4  # blocks that a program writes
SEGMENT = 256  # words
_BLOCK, _LOG2_BLOCK, _ROWS = tl.constexpr(BLOCK), tl.constexpr(BLOCK.bit_length() - 1), tl.constexpr(ROWS)
_HIGHS_OFFSET = tl.constexpr(HEADER_NBYTES)  # the string is the first field
_SEGMENT = tl.constexpr(SEGMENT)
_COUNTS = tl.constexpr(1024)  # segments whose counts are added up at a time


# -------------------------------------------------------------------- writing


@triton.jit
def _packed_lows(indices_ptr, count, words, LOW: tl.constexpr):
    """The ``words`` of the packed low bits of ``count`` entries, int32."""
    packed = tl.zeros(words.shape, tl.int32)
    for number in tl.static_range((30 + LOW) // LOW + 1):  # the largest number of entries that share a word
        entry = words * 32 // LOW + number
        shift = entry * LOW - words * 32
        index = tl.load(indices_ptr + entry, mask=(entry < count) & (shift < 32), other=0)
        low = index & (2**LOW - 1)
        packed |= low >> -shift if number == 0 else low << tl.minimum(shift, 31)  # only the first began before the word
    return packed


@triton.jit
def _quantize(values, sizes, BITS: tl.constexpr):
    """``(scales [ROWS], NaN if not finite; codes [ROWS, BLOCK])`` of rows with ``sizes`` values each."""
    if BITS == 2:
        total = pairwise_sum(tl.abs(values), _ROWS, _LOG2_BLOCK)
        scales = zero_below_normal(tl.div_rn(total, tl.maximum(sizes, 1).to(tl.float32)))
    else:
        largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        scales = absmax_scale(largest.to(tl.float32, bitcast=True), BITS)
    finite = is_finite(scales)
    exists = tl.arange(0, _BLOCK)[None, :] < sizes[:, None]
    codes = tl.where(finite[:, None] & exists, quantize_codes(values, scales[:, None], BITS), 0)
    return tl.where(finite, scales, float("nan")), codes


@triton.jit(do_not_specialize=["k"])
def _write_kernel(
    indices_ptr,  # int32 [chunks, k]
    values_ptr,  # fp32 [chunks, k]
    velocities_ptr,  # fp32 [chunks, k]
    bounds_ptr,  # int32 [chunks, 4], the last column is the number of entries
    residual_ptr,  # at the entries still the old values
    velocity_ptr,  # likewise
    payload_ptr,  # uint8 [chunks, payload_stride]
    chunk_numel,
    payload_stride,
    k,
    lows_offset,
    lows_words,  # padding included, as in the slots below
    scales_offset,
    scales_slots,
    values_offset,
    values_slots,
    C: tl.constexpr,
    place=None,
):
    LOW: tl.constexpr = C.low
    BITS: tl.constexpr = C.bits
    program, _, chunk = place_of(place)
    program = program.to(tl.int64)
    first = program * (_ROWS * _BLOCK)
    count = tl.minimum(tl.load(bounds_ptr + chunk * 4 + 3) - first, _ROWS * _BLOCK).to(tl.int32)  # from `first` on
    indices_ptr += chunk * k + first
    rows, columns = tl.arange(0, _ROWS), tl.arange(0, _BLOCK)
    entries = rows[:, None] * _BLOCK + columns[None, :]
    exists = entries < count
    indices = tl.load(indices_ptr + entries, mask=exists, other=0)
    values = tl.load(values_ptr + chunk * k + first + entries, mask=exists, other=0.0)
    payload_ptr += chunk * payload_stride

    highs_ptr = (payload_ptr + _HIGHS_OFFSET).to(tl.pointer_type(tl.int32)) + first // 32
    places = entries + (indices.to(tl.int64) if LOW == 0 else indices >> LOW)  # behind the place of `first`
    ones = tl.full(indices.shape, 1, tl.int32) << (places & 31).to(tl.int32)
    tl.atomic_or(highs_ptr + (places >> 5), ones, mask=exists, sem="relaxed")
    if LOW > 0:
        WORDS: tl.constexpr = _ROWS * _BLOCK // 32 * LOW
        words = tl.arange(0, C.lows_pad)
        lows_ptr = (payload_ptr + lows_offset).to(tl.pointer_type(tl.int32)) + program * WORDS
        inside = words < tl.minimum(lows_words - program * WORDS, WORDS).to(tl.int32)
        tl.store(lows_ptr + words, _packed_lows(indices_ptr, count, words, LOW), mask=inside)

    if BITS >= 16:
        slots, inside = first + entries, entries < tl.minimum(values_slots - first, _ROWS * _BLOCK).to(tl.int32)
        if BITS == 32:
            bits = tl.where(values != values, 0x7FC00000, values.to(tl.int32, bitcast=True))
            to_ptr = (payload_ptr + values_offset).to(tl.pointer_type(tl.int32))
            tl.store(to_ptr + slots, bits, mask=inside)
            decoded = values
        else:
            bits = bf16_bits(values)
            to_ptr = (payload_ptr + values_offset).to(tl.pointer_type(tl.int16))
            tl.store(to_ptr + slots, bits.to(tl.int16), mask=inside)
            decoded = bf16_value(bits)
    else:
        sizes = tl.minimum(tl.maximum(count - rows * _BLOCK, 0), _BLOCK)
        scales, codes = _quantize(values, sizes, BITS)
        scales_ptr = (payload_ptr + scales_offset).to(tl.pointer_type(tl.float32)) + program * _ROWS
        tl.store(scales_ptr + rows, scales, mask=program * _ROWS + rows < scales_slots)
        slots, _ = bitpack.packed_slots(rows, _ROWS, _BLOCK, BITS)
        slots += program * (_ROWS * _BLOCK * BITS // 8)
        packed = bitpack.pack_bits(codes, _ROWS, _BLOCK, BITS)
        tl.store(payload_ptr + values_offset + slots, packed, mask=slots < values_slots)
        decoded = dequantize_codes(codes, scales[:, None], BITS)
    if C.has_residual and BITS < 32:
        left = values - decoded
        kept = exists & is_finite(left)
        tl.store(residual_ptr + chunk * chunk_numel + indices, left, mask=kept)
        if C.has_velocity:
            velocity = tl.load(velocities_ptr + chunk * k + first + entries, mask=kept, other=0.0)
            velocity = tl.where(decoded == 0.0, velocity, 0.0)
            tl.store(velocity_ptr + chunk * chunk_numel + indices, velocity, mask=kept)


def write(compressor, indices, values, velocities, bounds, states, payload, size: int) -> None:
    """Launch the writing of entries into ``payload``, and of the errors of their values into the states.

    Args:
        compressor: the sparsifier.
        indices: int32 ``[chunks, k]``.
        values: fp32 ``[chunks, k]``.
        velocities: fp32 ``[chunks, k]``, or ``values`` if they are not needed.
        bounds: int32 ``[chunks, 4]``; the last column is the number of entries.
        states: residual and velocity, or None.
        payload: uint8 ``[chunks, nbytes]``, whose strings are zero.
        size: elements of a chunk.
    """
    chunks, k = indices.shape
    layout, entries = compressor.layout(size), compressor.entries
    places = {field.name: (field.offset, field.nbytes // field.dtype.itemsize) for field in layout.fields}
    lows_offset, lows_nbytes = places["lows"]
    launch(
        _write_kernel,
        (triton.cdiv(k, ROWS * BLOCK), chunks),
        *(indices, values, velocities, bounds, *(states or (values, values)), payload),
        *(chunk_step(size, chunks), payload.stride(0), k, lows_offset, lows_nbytes // 4),
        *(*places.get("scales", (0, 0)), *places["values"]),
        C=constants(
            low=entries.low,
            bits=entries.value_bits,
            has_residual=states is not None,
            has_velocity=velocities is not values,
            lows_pad=triton.next_power_of_2(ROWS * BLOCK // 32 * max(entries.low, 1)),
        ),
        num_warps=NUM_WARPS,
    )


# -------------------------------------------------------------------- finding


@triton.jit
def _load_segment(payload_ptr, source, chunk, source_stride, chunk_stride, words, num_words):
    """The ``words`` of a string. Behind its end they are all ones, so that counting zeros passes over them."""
    highs_ptr = payload_ptr + source * source_stride + chunk * chunk_stride + _HIGHS_OFFSET
    return tl.load(highs_ptr.to(tl.pointer_type(tl.int32)) + words, mask=words < num_words, other=-1)


@triton.jit(do_not_specialize=["chunks", "segments", "num_words", "tiles"])
def _count_zeros_kernel(
    payload_ptr,
    counts_ptr,  # int32 [sources, chunks, segments]
    starts_ptr,  # int64 [sources, chunks, tiles + 1]: becomes 0, then the string's end in all other places
    source_stride,
    chunk_stride,
    chunks,
    segments,
    num_words,
    tiles,
    C: tl.constexpr,
    place=None,
):
    program, _, _ = place_of(place)
    segment = (program % segments).to(tl.int64)
    string = (program // segments).to(tl.int64)
    offsets = tl.arange(0, _SEGMENT)
    places = segment * _SEGMENT + offsets
    words = _load_segment(
        payload_ptr, string // chunks, string % chunks, source_stride, chunk_stride, places, num_words
    )
    tl.store(counts_ptr + program, tl.sum(32 - bitpack.num_ones(words), 0))
    starts_ptr += string * (tiles + 1)
    end = tl.full((_SEGMENT,), 32, tl.int64) * num_words
    tile = segment * _SEGMENT
    while tile <= tiles:
        slots = tile + offsets
        tl.store(starts_ptr + slots, tl.where(slots == 0, 0, end), mask=slots <= tiles)
        tile += segments * _SEGMENT


@triton.jit(do_not_specialize=["chunks", "segments", "num_words", "tiles"])
def _find_starts_kernel(
    payload_ptr,
    counts_ptr,
    starts_ptr,
    source_stride,
    chunk_stride,
    chunks,
    segments,
    num_words,
    tiles,
    C: tl.constexpr,
    place=None,
):
    program, _, _ = place_of(place)
    segment = (program % segments).to(tl.int64)
    string = (program // segments).to(tl.int64)
    before = tl.full((), 0, tl.int64)
    counted = tl.full((), 0, tl.int64)
    while counted < segment:
        slots = counted + tl.arange(0, _COUNTS)
        before += tl.sum(tl.load(counts_ptr + string * segments + slots, mask=slots < segment, other=0), 0)
        counted += _COUNTS
    places = segment * _SEGMENT + tl.arange(0, _SEGMENT)
    words = _load_segment(
        payload_ptr, string // chunks, string % chunks, source_stride, chunk_stride, places, num_words
    )
    LOG2_GROUPS: tl.constexpr = C.log2_groups  # logarithm of the number of groups in a tile
    GROUPS: tl.constexpr = 2**LOG2_GROUPS
    starts_ptr += string * (tiles + 1)
    zeros = 32 - bitpack.num_ones(words)
    zeros = tl.cumsum(zeros, 0) - zeros + (before & (GROUPS - 1)).to(tl.int32)  # since the beginning of a tile
    for bit in range(32):
        is_zero = ((words >> bit) & 1) == 0
        zeros += is_zero.to(tl.int32)
        tile = (before >> LOG2_GROUPS) + (zeros >> LOG2_GROUPS)
        found = is_zero & ((zeros & (GROUPS - 1)) == 0) & (tile <= tiles)
        tl.store(starts_ptr + tile, places * 32 + (bit + 1), mask=found)


def find_starts(compressor, payloads: torch.Tensor, size: int, tiles: int) -> torch.Tensor:
    """Launch the search for tiles of ``SPAN`` elements in the strings of payloads ``[sources, chunks, nbytes]``.

    Returns:
        The number of bits before every tile, int64 ``[sources, chunks, tiles + 1]``.
    """
    sources, chunks, _ = payloads.shape
    highs = compressor.layout(size)["highs"]
    segments = max(1, triton.cdiv(highs.count, SEGMENT))
    counts = temporary(sources, chunks, segments, dtype=torch.int32, device=payloads.device)
    starts = temporary(sources, chunks, tiles + 1, dtype=torch.int64, device=payloads.device)
    arguments = payloads, counts, starts, payloads.stride(0), payloads.stride(1), chunks, segments, highs.count, tiles
    grid = (sources * chunks * segments,)
    of_tiles = constants(log2_groups=SPAN.bit_length() - 1 - compressor.entries.low)
    launch(_count_zeros_kernel, grid, *arguments, C=of_tiles, num_warps=NUM_WARPS)
    launch(_find_starts_kernel, grid, *arguments, C=of_tiles, num_warps=NUM_WARPS)
    return starts
