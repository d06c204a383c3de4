"""The functions of which quantisers are made: a statistic, and element-wise maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Dual:
    """A torch function with a ``@triton.jit`` function that gives the same bits and replaces the generated one.

    Attributes:
        torch: the torch function.
        triton: the Triton function.
        capability: the smallest compute capability, e.g. 89, of GPUs with what the Triton function needs. All others,
            and those of AMD, run the generated function. ``None`` if no GPU lacks it.
    """

    torch: Callable[..., Any]
    triton: Any
    capability: int | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The result of the torch form."""
        return self.torch(*arguments)


Function = Callable[..., Any]
"""A torch function, or a :class:`Dual`."""

SUM, MAX, MIN, LARGEST = "sum", "max", "min", "largest"
PADDING = {SUM: 0.0, MAX: -torch.inf, MIN: torch.inf, LARGEST: 0.0}
"""The term, for each reduction, that changes no result."""


@dataclass(frozen=True)
class Shortcut:
    """A cheaper computation of a statistic, for blocks of usual values.

    It is tried first for a tile. The statistic itself is computed where the shortcut does not hold for all blocks. Both
    give the same values to rounding.

    Attributes:
        statistic: the terms of the computation, and its ``finish``, with as many results as that of the statistic.
        holds: ``(partials, C) -> bool``, whether the reduced terms are precise enough; not where one is NaN.
    """

    statistic: Statistic
    holds: Function


@dataclass(frozen=True)
class Statistic:
    """The reduction of a block to the statistics with which the block is quantised.

    Attributes:
        kinds: the reduction of each term, ``SUM``, ``MAX``, ``MIN`` or ``LARGEST``. A NaN survives all of them.
            ``LARGEST`` is a ``MAX`` with fewer instructions, for terms without a sign that are 0 for the value 0. Every
            implementation chooses the order in which it adds up a sum.
        terms: ``(values, C) -> tuple`` of ``len(kinds)`` terms, element-wise.
        finish: ``(partials, count, C) -> tuple`` of the statistics, from the reduced terms. ``count`` is the number of
            elements, fp32, at least 1. A block with a statistic that is not finite decodes to NaN.
        size: number of statistics per block.
        shortcut: a cheaper computation for statistics per block.
    """

    kinds: tuple[str, ...]
    terms: Function
    finish: Function
    size: int = 1
    shortcut: Shortcut | None = None


@dataclass(frozen=True)
class Maps:
    """A quantiser's element-wise functions.

    The reference calls them with vectors ``[numel]`` and repeats the statistics of a block for each of its elements.
    Kernels call them with tiles ``[rows, block]`` and statistics that broadcast to these.

    The functions may use operators, comparisons, ``torch.where``, and methods such as ``abs``, ``round``, ``floor``,
    ``clamp`` and ``view`` between fp32 and int32. ``FORMS`` in ``c_forms.py`` and ``triton_forms.py`` lists them all.

    Attributes:
        quantize: ``(values, stats, dither, C) -> code`` in ``0 .. 2**bits - 1``. ``stats`` is a tuple. ``dither`` is
            shaped like ``values`` (stochastic quantisers only): ``dither_base`` plus a number that is uniform in
            [0, 1), for :func:`~gckernels.toolkit.random.rounded_at_random`. The torch function may return codes of
            dtype bool or of any integral dtype.
        dequantize: ``(code, stats, C) -> value``, fp32 from int32. The value must be NaN where a statistic is.
        statistic: ``None`` when none is needed. Then ``quantize`` needs a code for values that are not finite.
        accumulate: ``(grad, residual, C) -> values``, the values to encode.
        keep: ``(values, decoded, C) -> residual``, the new residual. Where it is not finite, the old one stays.
        merge: ``(total, scale, C) -> value``, from the sum of the decodings of all sources.
        surety: ``(values, C) -> number``, 0 for elements whose code depends on ``dither``, positive for all others.
            Kernels draw no random numbers for tiles without a 0. ``None`` if the codes of all elements depend on them.
        dither_base: see :func:`~gckernels.toolkit.random.dither`.
    """

    quantize: Function
    dequantize: Function
    statistic: Statistic | None = None
    accumulate: Function = lambda grad, residual, C: grad + residual
    keep: Function = lambda values, decoded, C: values - decoded
    merge: Function = lambda total, scale, C: total * scale
    surety: Function | None = None
    dither_base: int = 128
