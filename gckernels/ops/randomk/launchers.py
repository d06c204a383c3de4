"""How the kernels of :mod:`~gckernels.ops.randomk` are launched for one unit, and their compile-time arguments."""

from __future__ import annotations

import torch
import triton

from ...codec import Decoding, Encoding
from ...toolkit.constants import Constants, constants
from ...toolkit.kernels.launch import launch, temporary, waits
from ...toolkit.sparsifier.keys import require_size
from ...toolkit.tiles import chunk_step
from .header import HEADER_NUMEL
from .kernels import EMITTED_TILE, _accumulate_kernel, _decode_kernel, _emit_kernel
from .positions_kernels import LANES, NUM_WARPS, TILE, reciprocal

_SCRATCH_NUMEL = 4 * 1024 * 1024  # 16 MiB, which a large GPU keeps in its L2 cache


def pieces_of(compressor) -> int:
    """A number of ``LANES`` groups each, which as many groups as can overlap a tile need.

    These are the groups inside the tile, computed with ``k < ratio * size + 1``, and one group at either end.
    """
    return triton.cdiv(int(TILE * compressor.ratio) + 4, LANES)


def emit_programs_of(payload_count: int) -> int:
    """The number of programs that send the entries of a payload, one at least, which writes the header."""
    return max(1, triton.cdiv(payload_count - HEADER_NUMEL, EMITTED_TILE))


def programs_of(tiles: int) -> int:
    """The number of programs that decode ``tiles`` tiles, each with room for a tile in its scratch."""
    return min(tiles, _SCRATCH_NUMEL // TILE)


def accumulate_constants(compressor, has_residual: bool) -> Constants:
    return constants(has_residual=has_residual, pieces=pieces_of(compressor), waits=waits())


def decode_constants(compressor, accumulate: bool) -> Constants:
    return constants(accumulate=accumulate, pieces=pieces_of(compressor), waits=waits())


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    compressor, grad, residual, payload = unit.compressor, unit.grad, unit.residual, unit.payload
    size, seed = unit.size, unit.seed
    require_size(compressor.name, size)
    numel, chunks, numbers = grad.numel(), payload.shape[0], payload.view(torch.float32)
    kept, k, step = grad if residual is None else residual, compressor.capacity(size), chunk_step(size, chunks)
    nonfinite = temporary(chunks, dtype=torch.int32, device=grad.device, zeroed=True)
    least, inverse_k = size // max(k, 1), reciprocal(k)
    launch(
        _accumulate_kernel,
        (triton.cdiv(size, TILE), chunks),
        *(grad, kept, nonfinite, numel, step, size, k, least, inverse_k, reciprocal(size), seed, scale),
        C=accumulate_constants(compressor, residual is not None),
        num_warps=NUM_WARPS,
    )
    launch(
        _emit_kernel,
        (emit_programs_of(numbers.shape[1]), chunks),
        *(grad, kept, numbers, nonfinite, numel, step, size, numbers.stride(0), numbers.shape[1]),
        *(k, least, inverse_k, seed, scale),
        C=constants(has_residual=residual is not None),
        num_warps=NUM_WARPS,
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
        C=decode_constants(compressor, accumulate),
        num_warps=NUM_WARPS,
    )
