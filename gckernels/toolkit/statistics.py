"""Statistics that quantisers share, each in torch and in Triton (see ``quantizer.Maps``)."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from .quantizer import Array, Dual


@triton.jit
def _abs_sum(values, axis: tl.constexpr):
    return tl.sum(tl.abs(values), axis)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _abs_max(values, axis: tl.constexpr):
    # as integers, magnitudes are ordered with inf and NaN above all others; tl.max would drop NaN
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    bits = tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


def _abs_max_array(values: Array, axis: int) -> Array:
    if isinstance(values, np.ndarray):
        return np.abs(values).max(axis, initial=0.0)
    return values.abs().amax(axis) if values.shape[axis] else values.new_zeros(values.shape[0])


def _larger_array(a: Array, b: Array) -> Array:
    return np.maximum(a, b) if isinstance(a, np.ndarray) else torch.maximum(a, b)


# both libraries add pairwise here: the error grows with log(n), where that of a norm grows with n
ABS_SUM = Dual(lambda values, axis: abs(values).sum(axis), _abs_sum)
ADD = Dual(lambda a, b: a + b, _add)
ABS_MAX = Dual(_abs_max_array, _abs_max)
LARGER = Dual(_larger_array, _larger)
