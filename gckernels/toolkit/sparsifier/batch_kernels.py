"""The kernels of sparsifiers for many units in one launch; see ``toolkit/kernels/sharing.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.sharing import load_arguments
from .candidates_kernels import _list_kernel, _mark_kernel
from .decode_kernels import _decode_kernel
from .emit_kernels import _emit_kernel, _select_kernel
from .entries_kernels import _count_zeros_kernel, _find_starts_kernel, _write_kernel
from .narrowing_kernels import _count_kernel, _digit_kernel
from .selection_kernels import _bound_kernel, _sample_digit_kernel, _sample_kernel
from .states import _factor_kernel, _squares_kernel


@triton.jit
def _squares_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _squares_kernel(*arguments, TILE, place)


@triton.jit
def _factor_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    MAX_NORM: tl.constexpr,
    MAX_SUMS: tl.constexpr,
):
    _, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _factor_kernel(*arguments, MAX_NORM, MAX_SUMS)


@triton.jit
def _sample_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _sample_kernel(*arguments, None, BY_SAMPLE, INPUTS, TILE, place)


@triton.jit
def _sample_digit_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _sample_digit_kernel(*arguments, DIGIT, TILE, place)


@triton.jit
def _bound_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    DIGITS: tl.constexpr,
    SAMPLES: tl.constexpr,
    LEADING: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _bound_kernel(*arguments, BY_SAMPLE, DIGITS, SAMPLES, LEADING, place)


@triton.jit
def _mark_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    MARKS: tl.constexpr,
    LEAVES: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    NARROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _mark_kernel(*arguments, MARKS, LEAVES, BY_SAMPLE, NARROWS, INPUTS, TILE, place)


@triton.jit
def _list_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    NARROWS: tl.constexpr,
    MAX_RUNS: tl.constexpr,
    WORDS: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _list_kernel(*arguments, BY_SAMPLE, NARROWS, MAX_RUNS, WORDS, place)


@triton.jit
def _digit_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    DIGIT: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    LEFT: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _digit_kernel(*arguments, DIGIT, BY_SAMPLE, LEFT, INPUTS, TILE, place)


@triton.jit
def _count_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    DIGITS: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    LEFT: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _count_kernel(*arguments, DIGITS, BY_SAMPLE, LEFT, INPUTS, TILE, place)


@triton.jit
def _emit_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    STATUS: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    DIGITS: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    LEFT: tl.constexpr,
    EXACT: tl.constexpr,
    INPUTS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _emit_kernel(*arguments, STATUS, HIGHS_OFFSET, DIGITS, BY_SAMPLE, LEFT, EXACT, INPUTS, MAX_PROGRAMS, TILE, place)


@triton.jit
def _select_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    STATUS: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    DIGITS: tl.constexpr,
    SAMPLES: tl.constexpr,
    EXACT: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _select_kernel(*arguments, None, STATUS, HIGHS_OFFSET, DIGITS, SAMPLES, EXACT, INPUTS, TILE, place)


@triton.jit
def _write_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    LOWS_PAD: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _write_kernel(*arguments, HIGHS_OFFSET, LOW, BITS, HAS_RESIDUAL, HAS_VELOCITY, LOWS_PAD, LOG2_BLOCK, ROWS, place)


@triton.jit
def _count_zeros_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _count_zeros_kernel(*arguments, HIGHS_OFFSET, SEGMENT, place)


@triton.jit
def _find_starts_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    LOG2_GROUPS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _find_starts_kernel(*arguments, HIGHS_OFFSET, LOG2_GROUPS, SEGMENT, place)


@triton.jit
def _decode_batch_kernel(
    units_ptr,
    table_ptr,
    memory_ptr,
    added_ptr,
    A: tl.constexpr,
    STATUS: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WAITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    place, arguments = load_arguments(units_ptr, table_ptr, memory_ptr, added_ptr, A)
    _decode_kernel(*arguments, STATUS, HIGHS_OFFSET, LOW, BITS, ACCUMULATE, WAITS, BLOCK, STEP, RUN, PIECE, TILE, place)


BATCH_KERNELS = {
    _squares_kernel: _squares_batch_kernel,
    _factor_kernel: _factor_batch_kernel,
    _sample_kernel: _sample_batch_kernel,
    _sample_digit_kernel: _sample_digit_batch_kernel,
    _bound_kernel: _bound_batch_kernel,
    _mark_kernel: _mark_batch_kernel,
    _list_kernel: _list_batch_kernel,
    _digit_kernel: _digit_batch_kernel,
    _count_kernel: _count_batch_kernel,
    _emit_kernel: _emit_batch_kernel,
    _select_kernel: _select_batch_kernel,
    _write_kernel: _write_batch_kernel,
    _count_zeros_kernel: _count_zeros_batch_kernel,
    _find_starts_kernel: _find_starts_batch_kernel,
    _decode_kernel: _decode_batch_kernel,
}
"""The kernel of many units for every kernel of one."""
