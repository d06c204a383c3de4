"""Exchanging values between the threads of a program through global memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exchange_barrier(WAITS: tl.constexpr):
    """A barrier behind which all threads of the program see what any of them stored to global memory before.

    On NVIDIA GPUs every barrier does that. On AMD's a barrier does not wait for accesses to memory, so every wave waits
    for its own first (``WAITS``). All waves of a program share a cache, so nothing else is needed (LLVM, user guide for
    the AMDGPU backend, memory model of gfx942).
    """
    if WAITS:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1",
            "=v,v,~{memory}",
            [tl.full((), 0, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
