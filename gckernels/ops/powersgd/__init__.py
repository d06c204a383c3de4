"""PowerSGD: the gradient of a matrix as the product of two thin matrices (Vogels et al., NeurIPS 2019,
arXiv:1905.13727, algorithms 1 and 2).

A gradient is viewed as a matrix ``M [rows, cols]``, its first dimension by all others, and the residual of error
feedback is added. With the orthonormalised ``Q [cols, rank]`` of the previous step:

1. ``P = M Q``, averaged over the ranks and orthonormalised;
2. ``Q = Mᵀ P``, averaged over the ranks;
3. the gradient becomes ``P Qᵀ``, the residual ``M - P Qᵀ``.

``one_sided`` is the variant of the authors' code (epfml/powersgd) with one collective per step. An even step does 1.
and 3., and uses the mean of ``P`` as it is. An odd step does 2. and 3., with the orthonormalised mean ``P`` of the
previous step.

Ranks send ``P`` and ``Q`` in fp32. The factors are transposed to ``[rank, rows]`` and ``[rank, cols]``, so that every
column of a factor is contiguous, and multiplied by ``1 / world_size``, so that their sum is their mean. Zeros pad them
to a multiple of 16 bytes. There is no header. Inf and NaN are sent as values.

Example: ``rank=1``, one rank, ``M = [[3, 0], [4, 0]]``, ``Q = [1, 0]``::

    P = [3, 4]      bytes 00 00 40 40  00 00 80 40  00 .. 00 (16)
    orthonormal     [0.6, 0.8]
    Q = [5, 0]      bytes 00 00 A0 40  00 00 00 00  00 .. 00 (16)
    decoded [[3, 0], [4, 0]], residual zeros

The functions in ``reference.py`` are the specification.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ...compressor import Compressor, Traits
from ...devices import architecture_of, is_accelerator
from ...registration import register
from ...toolkit.fields import require_in, shown
from ...toolkit.payload import ALIGN_NBYTES, round_up
from ...toolkit.values import MAX_INT
from ..identity import Identity
from . import ops as _ops  # noqa: F401  defines torch.ops.gckernels.powersgd_*
from .reference import MAX_RANK


@register
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank approximation of gradients (see the module's docstring).

    Attributes:
        rank: number of columns of each factor, 1 to 32.
        warm_start: whether a step starts with the factor of the previous step; otherwise it starts with random numbers.
        one_sided: whether to have one collective per step, alternating between the factors; needs ``warm_start``.
        rows: rows of the unit's matrix; ``None`` until :meth:`~gckernels.Compressor.fit` has set it for a parameter.
    """

    rank: int = 4
    warm_start: bool = True
    one_sided: bool = False
    rows: int | None = None

    traits = Traits(summable=True, payload_dtype=torch.float32, needs_feedback=True, stochastic=True)

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"PowerSGD: rank must be an integer from 1 to {MAX_RANK}, got {shown(self.rank)}")
        require_in("PowerSGD", "warm_start", self.warm_start, (True, False))
        require_in("PowerSGD", "one_sided", self.one_sided, (True, False))
        if self.rows is not None and (type(self.rows) is not int or not 1 <= self.rows <= MAX_INT):
            raise ValueError(f"PowerSGD: rows must be None or a positive integer of 63 bits, got {shown(self.rows)}")
        if self.one_sided and not self.warm_start:
            raise ValueError("PowerSGD: one_sided takes warm_start: each step begins with the factor of the one before")

    @property
    def rounds(self) -> int:
        return 1 if self.one_sided else 2

    def fit(self, shape: Sequence[int]) -> Compressor:
        """This method with ``rows`` set, or :class:`~gckernels.Identity` if the factors are no smaller than the matrix.

        ``(rows + cols) * rank < rows * cols`` implies that ``rank`` is less than ``rows`` and less than ``cols``.
        """
        numel = math.prod(shape)
        rows = shape[0] if shape else 1
        if numel == 0 or (rows + numel // rows) * self.rank >= numel:
            return Identity()
        return dataclasses.replace(self, rows=rows)

    def arithmetic(self, device: torch.device) -> str:
        """The device and the compiler, whose products of matrices add in an order of their own; nothing for C on the
        CPU. Few columns are multiplied without tensor cores, but bases are made with those for fp64."""
        if is_accelerator(device):
            return f"PowerSGD by Triton {triton.__version__} on {architecture_of(device)}"
        if self._host_program() is None:
            return f"PowerSGD by eager torch on a CPU with {torch.backends.cpu.get_cpu_capability()}"
        return ""

    def compile_host(self, recodes: bool = False) -> None:
        self._host_program()

    @staticmethod
    def _host_program() -> Any:
        """The compiled functions for CPUs; ``None`` if they cannot be compiled."""
        from .host import build

        return build()

    def sides(self, numel: int) -> tuple[int, int]:
        """``(rows, cols)`` of a unit of ``numel`` elements.

        Raises:
            ValueError: ``numel`` is not a multiple of ``rows``, or the matrix is smaller than ``rank``.
        """
        if self.rows is None:
            raise ValueError("PowerSGD: rows is not set: the shape of the parameter is not known; see fit")
        if numel % self.rows:
            raise ValueError(f"PowerSGD: {numel} elements are no matrix of rows={self.rows}")
        rows, cols = self.rows, numel // self.rows
        if self.rank > min(rows, cols):
            raise ValueError(f"PowerSGD: rank={self.rank} is more than a matrix of {rows} x {cols} has")
        return rows, cols

    def round_nbytes(self, numel: int, index: int) -> int:
        """Bytes of P in the first round, of Q in the second. If ``one_sided``: the mean of two consecutive steps."""
        first, second = (round_up(4 * self.rank * side, ALIGN_NBYTES) for side in self.sides(numel))
        if self.one_sided:
            return 0 if index else (first + second) // 2
        return (first, second, 0)[min(index, 2)]

    def factor_sizes(self, numel: int) -> dict[str, int]:
        """Elements of the factors kept for the next steps if ``warm_start``: ``"q"``, and ``"p"`` if ``one_sided``."""
        rows, cols = self.sides(numel)
        if not self.warm_start:
            return {}
        return {"q": self.rank * cols} | ({"p": self.rank * rows} if self.one_sided else {})
