"""The kernels of PowerSGD that turn factors into orthonormal bases (``reference.orthogonalise``).

The first round is three launches, which share out all factors among many programs: inner products of parts, the
coefficients of the next columns, the next columns. The other rounds, which few factors need, are one launch with one
program for each factor. A round leaves a factor alone that an earlier one has finished. Sums are added up in an order
that depends on the length of the factor alone, so that all ranks get the same bits.

On AMD GPUs every round is three launches. Triton has no products of fp64 matrices there (``DOT``), so they are computed
row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...codec import SEED_MASK
from ...toolkit.kernels import launch as launching
from ...toolkit.kernels.exchange import exchange_barrier
from ...toolkit.kernels.launch import launch, temporary, waits
from ...toolkit.kernels.launch_batch import bind_launcher
from ...toolkit.kernels.seeds import seed_of
from ...toolkit.random import philox_tile
from .reference import CLEAR, DEPENDENT, ROUNDS
from .tables import on_device, padded

TILE = 1024  # elements of columns that are worked on at a time: more of them in fp64 would not fit the registers
PART = 1024  # elements of a column whose products one program adds up
SMALLEST = 16  # columns that are worked on, at least: a matrix product takes no fewer
# states of a factor: to go on with, just finished, just made all NaN, finished in an earlier round
_OPEN, _FINISHED, _SPOILED, _DONE = (tl.constexpr(each) for each in (0, 1, 2, 3))


@triton.jit
def _matrix(table_ptr, scratch_ptr, matrix, RANK: tl.constexpr):
    """A row of the table ``[matrices, 6]``: factor, rank, length, parts, where the columns and what is found begin."""
    row = table_ptr + matrix * 6
    factor_ptr = tl.load(row).to(tl.pointer_type(tl.float32))
    columns_ptr, found_ptr = scratch_ptr + tl.load(row + 4), scratch_ptr + tl.load(row + 5)
    return factor_ptr, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), columns_ptr, found_ptr


@triton.jit
def _piece(factor_ptr, columns_ptr, first, rank, length, FIRST: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """``[RANK, BLOCK]`` in fp64: of the factor in the first round, of the columns that a round has left in others."""
    index, at = tl.arange(0, RANK).to(tl.int64), first + tl.arange(0, BLOCK)
    offsets, mask = index[:, None] * length + at[None, :], (index < rank)[:, None] & (at < length)[None, :]
    if FIRST:
        return tl.load(factor_ptr + offsets, mask=mask, other=0.0).to(tl.float64)
    else:
        return tl.load(columns_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def _row_of(values, row, RANK: tl.constexpr):
    """A row of ``values [RANK, n]``, whatever the others contain."""
    return tl.sum(tl.where((tl.arange(0, RANK) == row)[:, None], values, 0.0), 0)


@triton.jit
def _products(
    factor_ptr,
    columns_ptr,
    begin,
    end,
    rank,
    length,
    FIRST: tl.constexpr,
    DOT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inner products of all columns, from ``begin`` to ``end``."""
    sums = tl.zeros((RANK, RANK), tl.float64)
    STAGES: tl.constexpr = 3 if FIRST else 1  # the kernel of the other rounds has no registers for loads ahead
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        values = _piece(factor_ptr, columns_ptr, first, rank, length, FIRST, RANK, BLOCK)
        if DOT:
            sums = tl.dot(values, tl.trans(values), sums, out_dtype=tl.float64)
        else:
            for column in range(0, rank):
                products = tl.sum(values * _row_of(values, column, RANK)[None, :], 1)
                sums += tl.where((tl.arange(0, RANK) == column)[None, :], products[:, None], 0.0)
    return sums


@triton.jit
def _solve(
    gram, before, last, rank, RANDOM: tl.constexpr, LIMIT: tl.constexpr, CLEAR: tl.constexpr, RANK: tl.constexpr
):
    """One round of the reference: coefficients, new squares of given lengths, which columns are usable, the state."""
    index = tl.arange(0, RANK)
    diagonal = index[:, None] == index[None, :]
    squares = tl.sum(tl.where(diagonal, gram, 0.0), 0)
    before = tl.where(before == 0, squares, before)
    usable = (squares > LIMIT * LIMIT * before) & (squares < float("inf"))  # false for NaN
    wrong = tl.sum(tl.where((squares < float("inf")) | (index >= rank), 0, 1), 0)
    taken = tl.where(diagonal, 1.0, 0.0).to(tl.float64)
    clear = tl.zeros((RANK,), tl.int32)
    for column in range(0, rank):
        here = index == column
        row = tl.sum(tl.where(here[:, None], gram, 0.0), 0)
        own = tl.sum(tl.where(here[None, :], taken, 0.0), 1)
        square = tl.sum(tl.where(here, row, 0.0), 0)
        weights = tl.sum(tl.where(diagonal, squares[None, :], 0.0), 1)
        used = tl.sum(tl.where(own == 0.0, 0.0, own * own * weights), 0)
        is_usable = tl.sum(tl.where(here & usable, 1, 0), 0) > 0
        is_clear = is_usable & (square > 0.0) & (used <= CLEAR * square)
        # a single division: in fp64 it is a call, around which registers are spilled
        inverse = 1.0 / tl.sqrt(tl.where(is_clear, square, 1.0))
        share = tl.where(usable & (index > column) & is_clear, row * (inverse * inverse), 0.0)
        ours = tl.sum(tl.where(here[None, :], gram, 0.0), 1)
        ours = tl.where(is_clear, ours, 0.0)  # a column that is not clear may be NaN
        gram -= ours[:, None] * share[None, :]
        taken -= own[:, None] * share[None, :]
        taken = tl.where(here[None, :] & is_clear, own[:, None] * inverse, taken)
        clear += tl.where(here & is_clear, 1, 0)
    kept = usable & ((clear > 0) | (last == 0))
    taken = tl.where(kept[None, :], taken, 0.0)
    waiting = usable & (clear == 0)
    before = tl.where(clear > 0, 0.0, before)  # their length is 1 from now on
    if RANDOM:
        waiting = waiting | ((index < rank) & (clear == 0))
        before = tl.where(usable, before, 0.0)
    state = tl.where((tl.sum(tl.where(waiting, 1, 0), 0) == 0) | last, _FINISHED, _OPEN)
    if not RANDOM:
        state = tl.where(wrong > 0, _SPOILED, state)
    return taken, before, usable, state


@triton.jit
def _random(seed, at):
    """Random numbers for the elements ``at``, fp64: ``dither`` of ``toolkit/random.py``, minus 128.5."""
    a, b, c, d = philox_tile(seed, (at // 16).to(tl.uint32))
    number = at // 4 % 4
    word = tl.where(number < 2, tl.where(number == 0, a, b), tl.where(number == 2, c, d)).to(tl.uint64)
    draw = ((word << 32 | word) >> (at % 4 * 8).to(tl.uint64)) & 0xFFFF
    return draw.to(tl.int32).to(tl.float64) * (1.0 / 65536) - 0.5


@triton.jit
def _replace(
    factor_ptr,
    columns_ptr,
    taken,
    usable,
    state,
    seed,
    first,
    rank,
    length,
    FIRST: tl.constexpr,
    RANDOM: tl.constexpr,
    DOT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace a piece of the factor by a piece of the basis if it is finished, otherwise a piece of the columns."""
    index, at = tl.arange(0, RANK).to(tl.int64), first + tl.arange(0, BLOCK)
    offsets, mask = index[:, None] * length + at[None, :], (index < rank)[:, None] & (at < length)[None, :]
    given = _piece(factor_ptr, columns_ptr, first, rank, length, FIRST, RANK, BLOCK)
    given = tl.where(usable[:, None], given, 0.0)  # it may not be finite
    if DOT:
        values = tl.dot(tl.trans(taken), given, out_dtype=tl.float64)
    else:
        values = tl.zeros((RANK, BLOCK), tl.float64)
        for column in range(0, rank):
            values += _row_of(taken, column, RANK)[:, None] * _row_of(given, column, RANK)[None, :]
    if state == _OPEN:
        if RANDOM:
            tl.store(columns_ptr + offsets, values, mask=mask & usable[:, None])
            tl.store(columns_ptr + offsets, _random(seed, offsets), mask=mask & (usable == 0)[:, None])
        else:
            tl.store(columns_ptr + offsets, values, mask=mask)
    else:
        tl.store(factor_ptr + offsets, tl.where(state == _SPOILED, float("nan"), values.to(tl.float32)), mask=mask)


# -------------------------------------------------------------------- a round of three launches


@triton.jit
def _multiply_kernel(
    table_ptr,
    work_ptr,  # [programs, 3]: matrix, first element, where the products go
    scratch_ptr,
    FIRST: tl.constexpr,
    DOT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 3
    matrix, begin, place = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    factor_ptr, rank, length, _, columns_ptr, found_ptr = _matrix(table_ptr, scratch_ptr, matrix, RANK)
    open_ = True
    if not FIRST:
        open_ = tl.load(found_ptr + RANK * (RANK + 2)) == _OPEN
    if open_:
        end = tl.minimum(begin + PART, length)
        sums = _products(factor_ptr, columns_ptr, begin, end, rank, length, FIRST, DOT, RANK, BLOCK)
        index = tl.arange(0, RANK)
        tl.store(scratch_ptr + place + index[:, None] * RANK + index[None, :], sums)


@triton.jit
def _solve_kernel(
    table_ptr,
    scratch_ptr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    RANDOM: tl.constexpr,
    LIMIT: tl.constexpr,
    CLEAR: tl.constexpr,
    RANK: tl.constexpr,
):
    _factor, rank, _length, parts, _columns, found_ptr = _matrix(table_ptr, scratch_ptr, tl.program_id(0), RANK)
    index = tl.arange(0, RANK)
    square = index[:, None] * RANK + index[None, :]
    before_ptr, usable_ptr, state_ptr = (
        found_ptr + RANK * RANK,
        found_ptr + RANK * (RANK + 1),
        found_ptr + RANK * (RANK + 2),
    )
    open_ = True
    before = tl.zeros((RANK,), tl.float64)
    if not FIRST:
        open_ = tl.load(state_ptr) == _OPEN
        before = tl.load(before_ptr + index)
    if open_:
        gram = tl.zeros((RANK, RANK), tl.float64)
        source = state_ptr + 1 + square
        for _part in range(parts):
            gram += tl.load(source)
            source += RANK * RANK
        taken, before, usable, state = _solve(gram, before, LAST, rank, RANDOM, LIMIT, CLEAR, RANK)
        tl.store(found_ptr + square, taken)
        tl.store(before_ptr + index, before)
        tl.store(usable_ptr + index, usable.to(tl.float64))
        tl.store(state_ptr, state.to(tl.float64))
    else:
        tl.store(state_ptr, _DONE)


@triton.jit
def _replace_kernel(
    table_ptr,
    work_ptr,  # [programs, 2]: matrix, first element
    seeds_ptr,
    scratch_ptr,
    added_ptr,  # int64, is added to every seed, or None
    FIRST: tl.constexpr,
    RANDOM: tl.constexpr,
    DOT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 2
    matrix, first = tl.load(work), tl.load(work + 1)
    factor_ptr, rank, length, _, columns_ptr, found_ptr = _matrix(table_ptr, scratch_ptr, matrix, RANK)
    state = tl.load(found_ptr + RANK * (RANK + 2))
    if state != _DONE:
        index = tl.arange(0, RANK)
        taken = tl.load(found_ptr + index[:, None] * RANK + index[None, :])
        usable = tl.load(found_ptr + RANK * (RANK + 1) + index) != 0.0
        own = seed_of(tl.load(seeds_ptr + matrix), added_ptr)
        _replace(
            factor_ptr, columns_ptr, taken, usable, state, own, first, rank, length, FIRST, RANDOM, DOT, RANK, BLOCK
        )


# -------------------------------------------------------------------- the other rounds in one launch


@triton.jit
def _finish_kernel(
    table_ptr,
    seeds_ptr,
    scratch_ptr,
    added_ptr,  # int64, is added to every seed, or None
    RANDOM: tl.constexpr,
    LIMIT: tl.constexpr,
    CLEAR: tl.constexpr,
    ROUNDS: tl.constexpr,
    WAITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(0)
    factor_ptr, rank, length, _, columns_ptr, found_ptr = _matrix(table_ptr, scratch_ptr, matrix, RANK)
    own = seed_of(tl.load(seeds_ptr + matrix), added_ptr)
    state = tl.load(found_ptr + RANK * (RANK + 2)).to(tl.int32)
    before = tl.load(found_ptr + RANK * RANK + tl.arange(0, RANK))
    for turn in range(1, ROUNDS):
        if state == _OPEN:
            exchange_barrier(WAITS)
            gram = _products(factor_ptr, columns_ptr, 0, length, rank, length, False, True, RANK, BLOCK)
            last = turn == ROUNDS - 1
            taken, before, usable, state = _solve(gram, before, last, rank, RANDOM, LIMIT, CLEAR, RANK)
            exchange_barrier(WAITS)
            for first in tl.range(0, length, BLOCK, num_stages=1):
                _replace(
                    factor_ptr,
                    columns_ptr,
                    taken,
                    usable,
                    state,
                    own,
                    first,
                    rank,
                    length,
                    False,
                    RANDOM,
                    True,
                    RANK,
                    BLOCK,
                )


# -------------------------------------------------------------------- launchers


def orthogonalise(factors, seeds: Sequence[int] | None, added: torch.Tensor | None = None) -> None:
    """Make every factor an orthonormal basis; the number in ``added`` is added to every one of ``seeds``."""
    device, rank = factors[0].device, padded(factors, SMALLEST)
    block = TILE // rank
    rows, parts, pieces, place = [], [], [], 0
    for index, factor in enumerate(factors):
        columns, length = factor.shape
        found, count = place + factor.numel(), triton.cdiv(length, PART)
        products = found + rank * (rank + 2) + 1
        rows.append((factor.data_ptr(), columns, length, count, place, found))
        parts += [(index, part * PART, products + part * rank * rank) for part in range(count)]
        pieces += [(index, first) for first in range(0, length, block)]
        place = products + count * rank * rank
    table, part_work, piece_work = (on_device(tuple(each), device) for each in (rows, parts, pieces))
    own = table if seeds is None else on_device(tuple((each & SEED_MASK,) for each in seeds), device)
    scratch = temporary(place, dtype=torch.float64, device=device)
    limits: dict[str, Any] = {"LIMIT": DEPENDENT, "CLEAR": CLEAR, "RANDOM": seeds is not None, "RANK": rank}
    exchanged = launching.BACKEND != "hip"  # Triton's backend for NVIDIA GPUs, and the interpreter
    for turn in range(1 if exchanged else ROUNDS):
        first: dict[str, Any] = {"FIRST": turn == 0}
        tiles = first | {"DOT": exchanged, "RANK": rank, "BLOCK": block}
        launch(_multiply_kernel, (len(parts),), table, part_work, scratch, PART=PART, **tiles)
        launch(_solve_kernel, (len(rows),), table, scratch, LAST=turn == ROUNDS - 1, **first, **limits)
        arguments = (table, piece_work, own, scratch, added)
        launch(_replace_kernel, (len(pieces),), *arguments, RANDOM=seeds is not None, **tiles)
    if exchanged:
        settings = limits | {"ROUNDS": ROUNDS, "BLOCK": block}
        launch(_finish_kernel, (len(rows),), table, own, scratch, added, WAITS=waits(), num_warps=8, **settings)


def bind_orthogonalise(factors, seeds: Sequence[int] | None, added: torch.Tensor | None = None) -> Callable[[], None]:
    return bind_launcher(functools.partial(orthogonalise, factors, seeds, added), factors[0].device)
