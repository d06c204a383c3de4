"""Small numeric functions for kernels whose result must be the same everywhere.

The interpreter truncates when it casts to bf16 and has no ``rint``; a compiled kernel would divide approximately and
contract ``a * b + c``. These forms give the same bits in the interpreter, on a GPU and in torch on a CPU (kernels are
launched without contraction, see ``launch.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def is_finite(x):
    """Neither inf nor NaN, elementwise, fp32."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INF_BITS


@triton.jit
def round_half_even(x):
    """Nearest integer, ties to even, as fp32; for abs(x) < 2**22 (adding 1.5 * 2**23 leaves no fraction bits)."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def reciprocal(x):
    """1 / x correctly rounded, and 0 for x below the smallest normal number, whose reciprocal could overflow."""
    normal = tl.abs(x) >= 1.1754943508222875e-38
    return tl.where(normal, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.where(normal, x, 1.0)), 0.0)


def reciprocal_torch(x: torch.Tensor) -> torch.Tensor:
    """See :func:`reciprocal`."""
    normal = x.abs() >= 1.1754943508222875e-38
    return torch.where(normal, 1.0 / torch.where(normal, x, 1.0), 0.0)


@triton.jit
def bf16_bits(x):
    """fp32 to the bits of the nearest bf16 (ties to even) as int32 in 0 .. 0xFFFF; NaN stays NaN."""
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
    """fp32, bf16 or fp16 to fp32, exactly (the interpreter's own cast is wrong for bf16 subnormals)."""
    if x.dtype == tl.bfloat16:
        return bf16_value(x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    else:
        return x.to(tl.float32)


@triton.jit
def store(pointers, values, mask):
    """Store fp32 ``values`` in the pointers' dtype, rounded to nearest even."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, bf16_bits(values).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
