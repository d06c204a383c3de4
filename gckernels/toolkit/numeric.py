"""Small numeric functions for kernels, with the same bits in the interpreter, on a GPU, and in torch on a CPU.

Plain operations differ: the interpreter truncates when casting to bf16 and has no ``rint``, and compiled kernels divide
approximately and contract ``a * b + c``. (Kernels are launched without contraction, see ``kernels/launch.py``.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import fx

from .lowering import CodesAsNumbers

INF_BITS = tl.constexpr(0x7F800000)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def is_finite(x):
    """Whether fp32 ``x`` is neither inf nor NaN, elementwise."""
    if _INTERPRETED:  # which makes numbers of the results of comparing numbers, if it repeats one for a vector
        return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INF_BITS
    else:
        return tl.abs(x) < float("inf")  # one instruction, as a comparison takes a magnitude as it reads a number


@triton.jit
def both(conditions, condition):
    """``conditions & condition``, of a tensor and a number, as a mask."""
    if _INTERPRETED:  # which repeats a condition as a number, and since Triton 3.9 takes no numbers as a mask
        return (conditions.to(tl.int32) & condition.to(tl.int32)) != 0
    else:
        return conditions & condition


@triton.jit
def rounded_code(x, ZERO: tl.constexpr, BITS: tl.constexpr):
    """See :func:`rounded_code_torch`."""
    return (x + (12582912.0 + ZERO)).to(tl.int32, bitcast=True) & (2**BITS - 1)


@triton.jit
def small_to_fp32(numbers, ZERO: tl.constexpr):
    """See :func:`small_to_fp32_torch`."""
    return (numbers | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def nearest(x):
    """Nearest integer, ties to even, as fp32 with the sign of ``x``, for all fp32."""
    size = tl.abs(x)
    rounded = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def negative_zero():
    """-0.0, which Triton makes 0.0 of when it is written as a number."""
    return tl.full((1,), -0x80000000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def at_least(x, low):
    """The larger of two fp32 numbers, NaN if one is NaN; which zero of two is open."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    """The smaller of two fp32 numbers, NaN if one is NaN; which zero of two is open."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_along(x, axis: tl.constexpr):
    """The largest fp32 number along an axis, NaN if one is NaN; which zero of two is open."""
    if _INTERPRETED:  # which would call the function for every single element
        return _with_nan(tl.max(tl.where(x == x, x, float("-inf")), axis), x, axis)
    else:
        return tl.reduce(x, axis, at_least)


@triton.jit
def min_along(x, axis: tl.constexpr):
    """The smallest fp32 number along an axis, NaN if one is NaN; which zero of two is open."""
    if _INTERPRETED:
        return _with_nan(tl.min(tl.where(x == x, x, float("inf")), axis), x, axis)
    else:
        return tl.reduce(x, axis, at_most)


@triton.jit
def _with_nan(extreme, x, axis: tl.constexpr):
    return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), extreme)


@triton.jit
def between(x, low, high):
    """``x``, or the bound that it is beyond, NaN if it is NaN; of fp32 numbers, ``low`` at most ``high``."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def shifted_left(x, count):
    """``x << count`` of int32, 0 for a count that is negative or above 31."""
    inside = (count >= 0) & (count < 32)
    return tl.where(inside, x << tl.where(inside, count, 0), 0)


@triton.jit
def shifted_right(x, count):
    """``x >> count`` of int32, as far as 31 bits for a count that is negative or above that."""
    return x >> tl.where((count >= 0) & (count < 32), count, 31)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded; 0 for abs(x) below the smallest normal number, where the reciprocal could overflow."""
    normal = tl.abs(x) >= 1.1754943508222875e-38
    return tl.where(normal, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.where(normal, x, 1.0)), 0.0)


def rounded_code_torch(x: torch.Tensor, zero: int, bits: int) -> torch.Tensor:
    """The integer nearest to fp32 ``x`` plus ``zero``, ties to even, as int32; any number of ``bits`` bits for NaN.

    The sum with 1.5 * 2**23 has no bits of a fraction, and its lowest bits are the integer. GPUs are faster at that
    than at a conversion, and C and LLVM do not define to what NaN is converted.

    Args:
        x: from ``-zero`` to ``2**bits - 1 - zero``, or NaN.
        zero: an even number.
        bits: 1 to 22.
    """
    return (x + (12582912.0 + zero)).view(torch.int32) & (2**bits - 1)


def sqrt_torch(x: torch.Tensor) -> torch.Tensor:
    """The square root of fp32 ``x``, correctly rounded, as C and kernels have it; torch's own is not on every machine.

    A root in fp64 is precise enough to be rounded once more.
    """
    return x.sqrt() if isinstance(x, fx.Proxy) else x.double().sqrt().float()


def small_to_fp32_torch(numbers: torch.Tensor, zero: int = 0) -> torch.Tensor:
    """``numbers - zero`` as fp32, of int32 in ``0 .. 2**23 - 1``.

    The bits of ``2**23`` with a number in their lowest places are ``2**23`` plus the number. GPUs are faster at that
    and at a subtraction than at a conversion.
    """
    if isinstance(numbers, CodesAsNumbers):
        return numbers.less(zero)
    return (numbers | 0x4B000000).view(torch.float32) - (2.0**23 + zero)


def negated_torch(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """``-values`` where ``bits``, int32, are 1, and ``values`` where they are 0."""
    return (values.view(torch.int32) ^ (bits << 31)).view(torch.float32)


def reciprocal_torch(x: torch.Tensor) -> torch.Tensor:
    """:func:`reciprocal` in torch."""
    normal = x.abs() >= 1.1754943508222875e-38
    return torch.where(normal, 1.0 / torch.where(normal, x, 1.0), 0.0)


@triton.jit
def bf16_bits(x):
    """The bits, int32 in 0 .. 0xFFFF, of the bf16 nearest to fp32 ``x`` (ties to even); NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    is_nan = (bits & 0x7FFFFFFF) > INF_BITS
    return (tl.where(is_nan, 0x7FC00000, rounded) >> 16) & 0xFFFF


@triton.jit
def bf16_value(bits):
    """The fp32 value of bf16 bits, int32 in 0 .. 0xFFFF."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_fp32(x):
    """fp32, bf16 or fp16 ``x`` as fp32, exactly; the interpreter's own cast is wrong for subnormal bf16 numbers."""
    if x.dtype == tl.bfloat16 and _INTERPRETED:
        return bf16_value(x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    else:
        return x.to(tl.float32)


@triton.jit
def store(pointers, values, mask):
    """Store fp32 ``values`` in the pointers' dtype, rounded to nearest, ties to even. NaN becomes any NaN."""
    if pointers.dtype.element_ty == tl.bfloat16 and _INTERPRETED:  # whose own cast truncates
        tl.store(pointers, bf16_bits(values).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
