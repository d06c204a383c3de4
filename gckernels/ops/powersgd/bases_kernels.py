"""The kernels of PowerSGD that turn a factor into an orthonormal basis, or keep a factor for the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...compressor import SEED_MASK
from ...toolkit.kernels.batch import signed
from ...toolkit.kernels.launch import launch
from ...toolkit.numeric import is_finite
from .reference import DEPENDENT
from .tables import on_device, padded

WARPS = 8
_MASK = tl.constexpr(SEED_MASK)


@triton.jit
def _norm(vector_ptr, length, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, length, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        values = tl.load(vector_ptr + offsets, mask=offsets < length, other=0.0)
        total += values * values
    return tl.sqrt(tl.sum(total, 0))


@triton.jit
def _remainder(basis_ptr, column, length, LIMIT: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Replace a column of ``basis [rank, length]``, fp64, by its normalised part outside the span of the columns before
    it, or by zero if it depends on them. Return whether it is independent."""
    vector_ptr = basis_ptr + column * length
    before = _norm(vector_ptr, length, BLOCK)
    index = tl.arange(0, RANK).to(tl.int64)
    for _ in range(2):
        shares = tl.zeros((RANK,), tl.float64)
        for first in range(0, length, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            values = tl.load(vector_ptr + offsets, mask=offsets < length, other=0.0)
            mask = (index < column)[:, None] & (offsets < length)[None, :]
            others = tl.load(basis_ptr + index[:, None] * length + offsets[None, :], mask=mask, other=0.0)
            shares += tl.sum(others * values[None, :], 1)
        tl.debug_barrier()
        for first in range(0, length, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            values = tl.load(vector_ptr + offsets, mask=offsets < length, other=0.0)
            mask = (index < column)[:, None] & (offsets < length)[None, :]
            others = tl.load(basis_ptr + index[:, None] * length + offsets[None, :], mask=mask, other=0.0)
            values -= tl.sum(others * shares[:, None], 0)
            tl.store(vector_ptr + offsets, values, mask=offsets < length)
        tl.debug_barrier()
    after = _norm(vector_ptr, length, BLOCK)
    independent = after > LIMIT * before  # false for NaN
    # a single division: in fp64 it is a call, around which registers are spilled
    factor = 1.0 / tl.where(independent, after, 1.0)
    tl.debug_barrier()
    for first in range(0, length, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        values = tl.load(vector_ptr + offsets, mask=offsets < length, other=0.0)
        tl.store(vector_ptr + offsets, tl.where(independent, values * factor, 0.0), mask=offsets < length)
    tl.debug_barrier()
    return independent


@triton.jit
def _all_finite(factor_ptr, numel, BLOCK: tl.constexpr):
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, numel, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        values = tl.load(factor_ptr + offsets, mask=offsets < numel, other=0.0)
        wrong += tl.where(is_finite(values), 0, 1)
    return tl.max(wrong, 0) == 0


@triton.jit
def _fill(factor_ptr, numel, value, BLOCK: tl.constexpr):
    for first in range(0, numel, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(factor_ptr + offsets, tl.zeros((BLOCK,), tl.float32) + value, mask=offsets < numel)


@triton.jit(do_not_specialize=["added"])
def _orthogonalise_kernel(
    table_ptr,  # [matrices, 4]: factor, offset of its fp64 copy, rank, length
    seeds_ptr,
    basis_ptr,
    added: tl.int64,  # is added to every seed
    RANDOM: tl.constexpr,
    LIMIT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table_ptr + tl.program_id(0) * 4
    factor_ptr = tl.load(row).to(tl.pointer_type(tl.float32))
    basis_ptr += tl.load(row + 1)
    rank, length = tl.load(row + 2), tl.load(row + 3)
    seed = (tl.load(seeds_ptr + tl.program_id(0)) + added) & _MASK
    numel = rank * length
    usable = True
    if not RANDOM:
        usable = _all_finite(factor_ptr, numel, BLOCK)
    if usable:
        for column in range(0, rank):
            for first in range(0, length, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                values = tl.load(factor_ptr + column * length + offsets, mask=offsets < length, other=0.0)
                tl.store(basis_ptr + column * length + offsets, values.to(tl.float64), mask=offsets < length)
            tl.debug_barrier()
            independent = _remainder(basis_ptr, column, length, LIMIT, RANK, BLOCK)
            if RANDOM and not independent:
                for first in range(0, length, BLOCK):
                    offsets = first + tl.arange(0, BLOCK)
                    values = _random(seed, column * length + offsets)
                    tl.store(basis_ptr + column * length + offsets, values, mask=offsets < length)
                tl.debug_barrier()
                _remainder(basis_ptr, column, length, LIMIT, RANK, BLOCK)
        for first in range(0, numel, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            values = tl.load(basis_ptr + offsets, mask=offsets < numel, other=0.0)
            tl.store(factor_ptr + offsets, values.to(tl.float32), mask=offsets < numel)
    else:
        _fill(factor_ptr, numel, float("nan"), BLOCK)


@triton.jit
def _random(seed, at):
    """Random numbers for the elements ``at``, fp64: ``uniform`` of ``toolkit/random.py`` with 16 bits, minus 1/2."""
    counter = at // 8
    zero = tl.zeros(at.shape, tl.uint32)
    a, b, c, d = tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero)
    word = at // 2 % 4
    bits = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    draw = (bits >> ((at % 2) * 16).to(tl.uint32)) & 0xFFFF
    return (draw.to(tl.int32).to(tl.float64) + 0.5) * (1.0 / 65536) - 0.5


@triton.jit
def _keep_kernel(table_ptr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row = table_ptr + tl.program_id(0) * 3  # mean, factor, numel
    mean_ptr = tl.load(row).to(tl.pointer_type(tl.float32))
    factor_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 2)
    if _all_finite(mean_ptr, numel, BLOCK):
        if HAS_FACTOR:
            used = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, numel, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                used += tl.where(tl.load(mean_ptr + offsets, mask=offsets < numel, other=0.0) != 0.0, 1, 0)
            if tl.max(used, 0) > 0:
                for first in range(0, numel, BLOCK):
                    offsets = first + tl.arange(0, BLOCK)
                    values = tl.load(mean_ptr + offsets, mask=offsets < numel, other=0.0)
                    tl.store(factor_ptr + offsets, values, mask=offsets < numel)
    else:
        tl.debug_barrier()
        _fill(mean_ptr, numel, float("nan"), BLOCK)


# -------------------------------------------------------------------- launchers


def orthogonalise(factors, seeds: Sequence[int] | None, added: int = 0) -> None:
    rows, place = [], 0
    for factor in factors:
        rows.append((factor.data_ptr(), place, *factor.shape))
        place += factor.numel()
    device, rank = factors[0].device, padded(factors, 1)
    table = on_device(tuple(rows), device)
    launch(
        _orthogonalise_kernel,
        (len(rows),),
        *(table, table if seeds is None else on_device(tuple((signed(seed),) for seed in seeds), device)),
        *(torch.empty(place, dtype=torch.float64, device=device), signed(added)),
        RANDOM=seeds is not None,
        LIMIT=DEPENDENT,
        RANK=rank,
        BLOCK=512 // rank,
        num_warps=WARPS,
        maxnreg=128,
        exchanges=True,
    )


def keep(means, factors) -> None:
    rows = tuple(
        (mean.data_ptr(), factors[index].data_ptr() if factors else 0, mean.numel()) for index, mean in enumerate(means)
    )
    table = on_device(rows, means[0].device)
    launch(_keep_kernel, (len(rows),), table, HAS_FACTOR=bool(factors), BLOCK=1024, exchanges=True)
