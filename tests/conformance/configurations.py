"""What the conformance suite runs over: every registered compressor, and what it must know about some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fractions import Fraction

import pytest
import torch

from gckernels import COMPRESSORS, Compressor
from gckernels.testing.agreement import assert_payloads_equal as assert_payloads_equal
from gckernels.testing.agreement import expected_residual as expected_residual
from gckernels.testing.agreement import has_sums as has_sums
from gckernels.testing.configurations import CONFIGURATIONS
from gckernels.testing.configurations import DEFAULTS as DEFAULTS  # the tests take both from here
from gckernels.toolkit.kernels.launch import Launch, record_launches
from helpers import interpreted

OURS = {name for name, cls in COMPRESSORS.items() if cls.__module__.startswith("gckernels.")}
"""The package's own compressors: what they must have written down is asked of no other that was registered."""


def parametrize(
    wanted: Callable[[Compressor], bool] = lambda compressor: True,
    among: dict[str, Compressor] = CONFIGURATIONS,
    quick: Collection[str] | None = None,
) -> pytest.MarkDecorator:
    """Run a test with every configuration that is ``wanted``, as its argument ``compressor``; those that are not
    ``quick`` are slow.

    What depends on the class alone, such as its ops, is tested ``among=DEFAULTS``.
    """
    chosen = [
        pytest.param(compressor, id=spec, marks=[] if quick is None or spec in quick else [pytest.mark.slow])
        for spec, compressor in among.items()
        if wanted(compressor)
    ]
    return pytest.mark.parametrize("compressor", chosen)


# -------------------------------------------------------------------- what `make test` interprets


def _launches(compressor: Compressor) -> list[Launch]:
    """The launches of encoding with feedback and of decoding."""
    numel = 4096
    payload = torch.empty(1, 1, compressor.payload_nbytes(numel), dtype=torch.uint8)
    grad, residual = torch.empty(numel), torch.empty(compressor.states * numel)
    with record_launches() as recorded:
        compressor.encode_triton(grad, residual, payload[0], numel, 0, 1.0)
        compressor.decode_triton(payload, grad, numel, 1.0, False)
    return recorded


def _first_with(part: Callable[[Launch], object]) -> dict[str, Compressor]:
    """The configurations of which some launch has a part that no launch of those before them has."""
    found, seen = {}, set()
    for spec, compressor in CONFIGURATIONS.items():
        parts = {part(launch) for launch in _launches(compressor)}
        if not parts <= seen:
            found[spec] = compressor
        seen |= parts
    return found


def _kernel(launch: Launch) -> tuple[object, ...]:
    dtypes = tuple(value.dtype for value in launch.args if isinstance(value, torch.Tensor))
    return launch.kernel, dtypes, *sorted(launch.constexprs.items(), key=str)


DIFFERENT = _first_with(_kernel)
"""One configuration for every kernel that differs from the others in its text or in its compile-time arguments."""

KINDS = _first_with(lambda launch: launch.kernel)
"""One configuration for every text. The texts see to sizes, chunks, strides and dtypes; the functions that a compressor
applies to values are compile-time arguments."""


ONE_OF_EACH_KIND = {spec: compressor for spec, compressor in DEFAULTS.items() if spec in KINDS}

INTERPRETED_IN_ALL = interpreted(DIFFERENT.values())
INTERPRETED_IN_KINDS = interpreted(KINDS.values())


# -------------------------------------------------------------------- payload sizes, as the docstrings state them


def _field(nbytes: int) -> int:
    """Bytes of a field: the next multiple of 16."""
    return (nbytes + 15) // 16 * 16


def _ceil(numel: int, divisor: int) -> int:
    return (numel + divisor - 1) // divisor


def _chunk_top_k_nbytes(c: Compressor, n: int) -> int:
    groups = _ceil(n, c.chunk)
    scales = 0 if c.value_bits == 16 else _field(groups * 4)
    return 16 + scales + _field(groups * c.k * 12 // 8) + _field(groups * c.k * c.value_bits // 8)


def _qsgd_nbytes(c: Compressor, n: int) -> int:
    bits = math.ceil(math.log2(c.levels + 1)) + 1
    return 16 + _field(4 * _ceil(n, c.bucket)) + _field(_ceil(n * bits, 8))


def _sign_nbytes(c: Compressor, n: int) -> int:
    return 16 + _field(2 * _ceil(n, 4096)) + _field(_ceil(n, 8))


def _sparse_nbytes(c: Compressor, n: int) -> int:
    ratio = Fraction(str(c.ratio))
    k = math.ceil(n * ratio)
    low = min(range(12), key=lambda bits: ratio * (bits + 1) + Fraction(1, 2**bits))  # fewest bits per element
    highs, lows = _field(4 * _ceil(k + _ceil(n, 2**low), 32)), _field(_ceil(k * low, 8))
    scales = 0 if c.value_bits >= 16 else _field(4 * _ceil(k, 64))
    return 16 + highs + lows + scales + _field(_ceil(k * c.value_bits, 8))


def _blocks(c: Compressor, n: int) -> int:
    return 1 if c.block is None else _ceil(n, c.block)


STATED_NBYTES: dict[str, Callable[[Compressor, int], int]] = {
    "BlockFP8": lambda c, n: 16 + _field(4 * _ceil(n, c.block)) + _field(n),
    "BlockQuant": lambda c, n: 16 + _field(_ceil(n, c.block) * c.scale_dtype.itemsize) + _field(_ceil(n * c.bits, 8)),
    "Cast16": lambda c, n: max(16, _field(2 * n)),
    "ChunkTopK": _chunk_top_k_nbytes,
    "DGC": _sparse_nbytes,
    "EFSignSGD": lambda c, n: 16 + _field(4 * _blocks(c, n)) + _field(_ceil(n, 8)),
    "GradDrop": _sparse_nbytes,
    "Identity": lambda c, n: max(16, _field(4 * n)),
    "LinearQuant": lambda c, n: 16 + _field(8 * _blocks(c, n)) + _field(_ceil(n * c.bits, 8)),
    "MSTopK": _sparse_nbytes,
    "Natural": lambda c, n: 16 + _field(n),
    "OneBit": lambda c, n: 16 + _field(8 * _blocks(c, n)) + _field(_ceil(n, 8)),
    "QSGD": _qsgd_nbytes,
    "RandomK": lambda c, n: 32 + _field(4 * math.ceil(n * Fraction(str(c.ratio)))),
    "SigNUM": _sign_nbytes,
    "SignSGD": _sign_nbytes,
    "TBQ": lambda c, n: 16 + _field(_ceil(n, 4)),
    "TernGrad": lambda c, n: 16 + _field(4 * _blocks(c, n)) + _field(_ceil(n, 4)),
    "Threshold": _sparse_nbytes,
    "TopK": _sparse_nbytes,
}
"""Payload size by class name, written down a second time from the wire format in each module's docstring."""


# -------------------------------------------------------------------- what need not be equal

SHOWN_ELSEWHERE = {"RandomK": "what is not sent cannot show where it is: everything that is sent shows it"}
"""Classes of which inf or NaN show in other elements than the one that was not finite, and why."""

AMBIGUOUS_WHEN_RANDOM = {
    "ChunkTopK": "an index that occurs twice in a group, which no encoder writes, may count once or twice",
}
"""Classes whose random payloads may decode to different values in different implementations, and why."""
