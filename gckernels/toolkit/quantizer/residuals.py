"""Functions that kernels call to load and store the residuals of a tile, fp32 or in 8 bits (``toolkit/residuals.py``).

A tile begins at a multiple of the elements of a group. ``Q.encoded_residual`` says in which of the two forms it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import residuals
from ..numeric import rounded_code
from ..payload import ALIGN_NBYTES
from ..tiles import load_tile, store_tile

_GROUP = tl.constexpr(residuals.GROUP)
_CARRY = tl.constexpr(residuals.CARRY)
_ALIGN = tl.constexpr(ALIGN_NBYTES)


@triton.jit
def load_residual(residual_ptr, first, offsets, chunk, chunk_numel, tile_first, here, Q: tl.constexpr):
    """The residuals of a tile in the shape of ``offsets``, with zeros behind the first ``here``. The tile begins with
    element ``tile_first`` of the chunk, which is ``first`` in the unit."""
    if Q.encoded_residual:
        GROUPS: tl.constexpr = Q.tile // _GROUP
        exponents_ptr, codes_ptr = _row(residual_ptr, chunk, chunk_numel, tile_first)
        groups = tl.arange(0, GROUPS)
        exponents = tl.load(exponents_ptr + groups, mask=groups * _GROUP < here, other=0)
        scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        spread = tl.broadcast_to(scales[:, None], (GROUPS, _GROUP))
        return load_tile(codes_ptr, offsets, here, Q.tile) * tl.reshape(spread, offsets.shape)
    else:
        return load_tile(residual_ptr + first, offsets, here, Q.tile)


@triton.jit
def store_residual(residual_ptr, values, first, offsets, chunk, chunk_numel, tile_first, here, Q: tl.constexpr):
    """Store the first ``here`` of the finite fp32 ``values`` of a tile."""
    if Q.encoded_residual:
        GROUPS: tl.constexpr = Q.tile // _GROUP
        exponents_ptr, codes_ptr = _row(residual_ptr, chunk, chunk_numel, tile_first)
        if here < Q.tile:  # a code of nothing may be worth something
            values = tl.where(offsets < here, values, 0.0)
        grouped = tl.reshape(values, (GROUPS, _GROUP))
        largest = tl.max(tl.abs(grouped), 1)
        exponents = tl.maximum(((largest.to(tl.int32, bitcast=True) + _CARRY) >> 23) - 6, 1)
        powers = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
        codes = rounded_code(grouped * powers[:, None], 0, 8).to(tl.int8)
        groups = tl.arange(0, GROUPS)
        places = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        if here == Q.tile:
            tl.store(codes_ptr + places, codes)
        else:
            tl.store(codes_ptr + places, codes, mask=places < here)
        tl.store(exponents_ptr + groups, exponents.to(tl.uint8), mask=groups * _GROUP < here)
    else:
        store_tile(residual_ptr + first, offsets, values, here, Q.tile)


@triton.jit
def _row(residual_ptr, chunk, chunk_numel, tile_first):
    """Pointers to the exponents and the codes of a tile."""
    exponents_nbytes = (((chunk_numel + _GROUP - 1) // _GROUP + _ALIGN - 1) // _ALIGN) * _ALIGN
    row_ptr = residual_ptr + chunk * (exponents_nbytes + chunk_numel)
    codes_ptr = (row_ptr + exponents_nbytes + tile_first).to(tl.pointer_type(tl.int8))
    return row_ptr + tile_first // _GROUP, codes_ptr
