"""The launches of the kernels of :mod:`~gckernels.ops.randomk`, and their compile-time arguments."""

from __future__ import annotations

import torch
import triton

from ...codec import Decoding, Encoding
from ...toolkit.constants import constants
from ...toolkit.kernels.launch import launch, temporary, waits
from ...toolkit.kernels.sharing import KernelBackend
from ...toolkit.sparsifier.keys import require_size
from ...toolkit.tiles import chunk_step
from .header import HEADER_NUMEL
from .kernels import EMITTED_TILE, _accumulate_kernel, _decode_kernel, _emit_kernel
from .positions_kernels import LANES, NUM_WARPS, TILE, reciprocal

_MAXNREG = 96
"""Limit of the registers of a program that decodes several pieces: by itself, ptxas spills a value, or takes 128."""
_SCRATCH_NUMEL = 4 * 1024 * 1024  # 16 MiB, which a large GPU keeps in its L2 cache


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
        C=constants(has_residual=residual is not None, pieces=_pieces_of(compressor), waits=waits()),
        num_warps=NUM_WARPS,
    )
    launch(
        _emit_kernel,
        # one program at least, which writes the header
        (max(1, triton.cdiv(numbers.shape[1] - HEADER_NUMEL, EMITTED_TILE)), chunks),
        *(grad, kept, numbers, nonfinite, numel, step, size, numbers.stride(0), numbers.shape[1]),
        *(k, least, inverse_k, seed, scale),
        C=constants(has_residual=residual is not None),
        num_warps=NUM_WARPS,
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    compressor, out, size, numbers = unit.compressor, unit.out, unit.size, unit.payloads.view(torch.float32)
    sources, chunks, _ = numbers.shape
    tiles, k, pieces = triton.cdiv(min(size, out.numel()), TILE), compressor.capacity(size), _pieces_of(compressor)
    at_once = min(tiles, max(1, _SCRATCH_NUMEL // (TILE * chunks)))
    scratch = temporary(chunks, at_once, TILE, dtype=torch.float32, device=out.device)
    launch(
        _decode_kernel,
        (at_once, chunks),
        *(numbers, out, scratch, out.numel(), chunk_step(size, chunks), size, tiles, sources),
        *(numbers.stride(0), numbers.stride(1), k, size // max(k, 1), reciprocal(k), reciprocal(size), scale),
        C=constants(accumulate=accumulate, loops=at_once < tiles, pieces=pieces, waits=waits()),
        num_warps=NUM_WARPS,
        maxnreg=_MAXNREG if pieces > 1 else None,
    )


def _pieces_of(compressor) -> int:
    """A number of ``LANES`` groups each, which as many groups as can overlap a tile need.

    These are the groups inside the tile, computed with ``k < ratio * size + 1``, and one group at either end.
    """
    return triton.cdiv(int(TILE * compressor.ratio) + 4, LANES)


class RandomKTriton(KernelBackend):
    """The algorithm as kernels. Small units that are bound together share launches."""

    encode = staticmethod(encode)
    decode = staticmethod(decode)
