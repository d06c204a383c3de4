"""How kernels are launched, in one place, so that launches can be recorded instead of run.

Ahead-of-time compilation needs to know every kernel in every configuration that ships. Rather than a list kept by
hand, the launchers themselves run under :func:`record_launches` and what they would have launched is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of every launch.

``enable_fp_fusion`` is off because a contracted multiply-add would round a residual or a merged value differently
from the reference; the kernels are bound by memory and do not get slower.
"""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid, positional arguments, constexpr arguments by name, and what the compiler is told."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int
    maxnreg: int | None

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options."""
        limit = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return OPTIONS | {"num_warps": self.num_warps} | limit


_recorded: list[Launch] | None = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    maxnreg: int | None = None,
    **constexprs: Any,
) -> None:
    """Run ``kernel``; an empty grid runs nothing.

    Without ``maxnreg``, the registers that a thread may have, ptxas chooses, and in kernels with loops inside of loops
    rather spills one or two values than give up a step of occupancy.
    """
    if 0 in grid:
        return
    launched = Launch(kernel, grid, args, constexprs, num_warps, maxnreg)
    if _recorded is not None:
        _recorded.append(launched)
        return
    kernel[grid](*args, **constexprs, **launched.options)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect the launches of this block in a list instead of running them (not for concurrent use)."""
    global _recorded
    outer, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = outer
