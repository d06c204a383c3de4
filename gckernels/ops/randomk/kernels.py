"""The kernels of :mod:`~gckernels.ops.randomk`: ``programs.py`` has what they do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...codec import Decoding, Encoding
from ...toolkit.kernels.launch import launch, temporary
from ...toolkit.kernels.seeds import seed_of
from ...toolkit.sparsifier.keys import require_size
from ...toolkit.tiles import chunk_step
from .header import HEADER_NUMEL
from .programs import accumulate_program, decode_tile, emit_program, reciprocal

TILE, EMITTED_TILE, NUM_WARPS = 4096, 1024, 4
LANES = 32 * NUM_WARPS  # one group for each thread
_SCRATCH_NUMEL = 4 * 1024 * 1024  # 16 MiB, which a large GPU keeps in its L2 cache


@triton.jit(do_not_specialize=["size", "k", "least", "inverse_k", "inverse_size", "seed"])
def _accumulate_kernel(
    grad_ptr,
    residual_ptr,  # the gradient is added to it, except at the positions of entries
    nonfinite_ptr,  # int32 [chunks], set to 1 if an element of the chunk is not finite
    numel,
    chunk_numel,
    size,
    k: tl.int64,
    least: tl.int64,  # elements of a group
    inverse_k: tl.int64,  # see reciprocal
    inverse_size: tl.int64,
    seed: tl.int64,
    scale,
    added_ptr,
    HAS_RESIDUAL: tl.constexpr,
    WAITS: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    accumulate_program(
        grad_ptr, residual_ptr, nonfinite_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), numel,
        chunk_numel, size, k, least, inverse_k, inverse_size, seed_of(seed, added_ptr), scale, HAS_RESIDUAL, WAITS,
        PIECES, LANES, TILE
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "k", "least", "inverse_k", "seed"])
def _emit_kernel(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # fp32 [chunks, payload_stride]
    nonfinite_ptr,
    numel,
    chunk_numel,
    size,
    payload_stride,
    payload_count,  # padding included
    k: tl.int64,
    least: tl.int64,  # elements of a group
    inverse_k: tl.int64,
    seed: tl.int64,
    scale,
    added_ptr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    emit_program(
        grad_ptr, residual_ptr, payload_ptr, nonfinite_ptr, tl.program_id(0).to(tl.int64),
        tl.program_id(1).to(tl.int64), numel, chunk_numel, size, payload_stride, payload_count, k, least,
        inverse_k, seed_of(seed, added_ptr), scale, HAS_RESIDUAL, TILE
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "tiles", "num_items", "num_sources", "k", "least", "inverse_k", "inverse_size"])
def _decode_kernel(
    payload_ptr,  # fp32 [sources, chunks, ...]
    out_ptr,
    scratch_ptr,  # fp32 [programs, TILE]
    numel,
    chunk_numel,
    size,
    tiles,  # per chunk
    num_items,  # chunks * tiles
    num_sources,
    source_stride,
    chunk_stride,
    k: tl.int64,
    least: tl.int64,  # elements of a group
    inverse_k: tl.int64,
    inverse_size: tl.int64,
    scale,
    ACCUMULATE: tl.constexpr,
    WAITS: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    scratch_ptr += tl.program_id(0).to(tl.int64) * TILE
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile, chunk = (item % tiles).to(tl.int64), (item // tiles).to(tl.int64)
        decode_tile(
            payload_ptr, out_ptr, scratch_ptr, tile, chunk, numel, chunk_numel, size, num_sources, source_stride,
            chunk_stride, k, least, inverse_k, inverse_size, scale, ACCUMULATE, WAITS, PIECES, LANES, TILE
        )  # fmt: skip


# -------------------------------------------------------------------- launchers


def pieces_of(compressor) -> dict[str, Any]:
    """Compile-time arguments: the groups that can overlap a tile are ``PIECES`` times ``LANES``, or fewer.

    These are the groups inside the tile, computed with ``k < ratio * size + 1``, and one group at either end.
    """
    return {"PIECES": triton.cdiv(int(TILE * compressor.ratio) + 4, LANES), "LANES": LANES}


def emit_programs_of(payload_count: int) -> int:
    """The number of programs that send the entries of a payload, one at least, which writes the header."""
    return max(1, triton.cdiv(payload_count - HEADER_NUMEL, EMITTED_TILE))


def programs_of(tiles: int) -> int:
    """The number of programs that decode ``tiles`` tiles, each with room for a tile in its scratch."""
    return min(tiles, _SCRATCH_NUMEL // TILE)


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    compressor, grad, residual, payload = unit.compressor, unit.grad, unit.residual, unit.payload
    size, seed = unit.size, unit.seed
    require_size(compressor.name, size)
    numel, chunks, numbers = grad.numel(), payload.shape[0], payload.view(torch.float32)
    kept, k, step = grad if residual is None else residual, compressor.capacity(size), chunk_step(size, chunks)
    nonfinite = temporary(chunks, dtype=torch.int32, device=grad.device, zeroed=True)
    least, inverse_k = size // max(k, 1), reciprocal(k)
    common: dict[str, Any] = {"HAS_RESIDUAL": residual is not None, "num_warps": NUM_WARPS}
    launch(
        _accumulate_kernel,
        (triton.cdiv(size, TILE), chunks),
        *(grad, kept, nonfinite, numel, step, size, k, least, inverse_k, reciprocal(size), seed, scale),
        **pieces_of(compressor),
        TILE=TILE,
        exchanges=True,
        **common,
    )
    launch(
        _emit_kernel,
        (emit_programs_of(numbers.shape[1]), chunks),
        *(
            grad,
            kept,
            numbers,
            nonfinite,
            numel,
            step,
            size,
            numbers.stride(0),
            numbers.shape[1],
            k,
            least,
            inverse_k,
            seed,
            scale,
        ),
        TILE=EMITTED_TILE,
        **common,
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    compressor, payloads, out, size = unit.compressor, unit.payloads, unit.out, unit.size
    sources, chunks, _ = payloads.shape
    numbers = payloads.view(torch.float32)
    tiles, k = triton.cdiv(min(size, out.numel()), TILE), compressor.capacity(size)
    programs = programs_of(chunks * tiles)
    scratch = temporary(programs, TILE, dtype=torch.float32, device=out.device)
    launch(
        _decode_kernel,
        (programs,),
        *(numbers, out, scratch, out.numel(), chunk_step(size, chunks), size, tiles, chunks * tiles),
        *(sources, numbers.stride(0), numbers.stride(1), k, size // max(k, 1), reciprocal(k), reciprocal(size), scale),
        ACCUMULATE=accumulate,
        **pieces_of(compressor),
        TILE=TILE,
        num_warps=NUM_WARPS,
        exchanges=True,
    )
