"""Questions to Triton's compiler about the GPU that it compiles for, answered while it compiles."""

from __future__ import annotations

import triton
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function


@constexpr_function
def for_nvidia(capability=0):
    """Whether it is a GPU of NVIDIA with at least this compute capability, e.g. 89; not in Triton's interpreter."""
    target = None if triton.knobs.runtime.interpret else current_target()
    return target is not None and target.backend == "cuda" and target.arch >= capability
