"""What the conformance suite runs over: every registered compressor, and what it must know about some of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from specs import CONFIGURATIONS
from specs import DEFAULTS as DEFAULTS  # the tests take both from here

from gckernels import COMPRESSORS, Compressor
from gckernels.toolkit import bitpack
from gckernels.toolkit.quantizer import SUM, MapQuantizer
from gckernels.toolkit.reference import new_residual

OURS = {name for name, cls in COMPRESSORS.items() if cls.__module__.startswith("gckernels.")}
"""The package's own compressors: what they must have written down is asked of no other that was registered."""


def parametrize(
    wanted: Callable[[Compressor], bool] = lambda compressor: True, among: dict[str, Compressor] = CONFIGURATIONS
) -> pytest.MarkDecorator:
    """Run a test with every configuration that is ``wanted``, as its argument ``compressor``.

    What depends on the class alone, such as its ops, is tested ``among=DEFAULTS``.
    """
    chosen = {spec: compressor for spec, compressor in among.items() if wanted(compressor)}
    return pytest.mark.parametrize("compressor", list(chosen.values()), ids=list(chosen))


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


# -------------------------------------------------------------------- what need not be equal to the last bit


def _longest_chain(numel: int) -> int:
    """Additions that a term of a sum of ``numel`` can pass through, in the implementation where they are most."""
    # torch adds in four levels of at most 16 steps (for up to 2 million elements) and 8 lanes after that; the host path
    # a tile of 16384 in 8 lanes or more, tiles in fp64; the kernel halves a tile of 2048, adds tiles one by one into
    # 256 sums, and halves those
    return max(4 * 16 + 8, 16384 // 8 + 8, 11 + numel // (256 * 2048) + 8)


def has_sums(compressor: Compressor) -> bool:
    """Its statistics hold sums, whose terms every implementation adds in an order of its own. What they are made of has
    one sign, so the relative error is at most one rounding per addition, and a few for what is done with them."""
    return isinstance(compressor, MapQuantizer) and SUM in getattr(compressor.maps.statistic, "kinds", ())


SHOWN_ELSEWHERE = {"RandomK": "what is not sent cannot show where it is: everything that is sent shows it"}
"""Classes of which inf or NaN show in other elements than the one that was not finite, and why."""

AMBIGUOUS_WHEN_RANDOM = {
    "ChunkTopK": "an index that occurs twice in a group, which no encoder writes, may count once or twice",
}
"""Classes whose random payloads may decode to different values in different implementations, and why."""


def assert_payloads_equal(
    compressor: Compressor,
    size: int,
    got: torch.Tensor,
    want: torch.Tensor,
    values: torch.Tensor,
    seed: int = 0,
) -> None:
    """Payloads ``[chunks, nbytes]`` of ``values [numel]`` are equal byte by byte; but for sums, which are equal to a
    bound, and then the codes are those that belong to the sums that were found."""
    if has_sums(compressor):
        layout = compressor.layout(size)
        want = want.clone()
        # two results, each with a rounding per addition, one for the term, a division and a root
        rtol = 2 * (_longest_chain(size) + 4) * 2.0**-24
        for chunk in range(want.shape[0]):
            found, expected = layout.view(got[chunk], "stats"), layout.view(want[chunk], "stats")
            torch.testing.assert_close(found, expected, rtol=rtol, atol=2.0**-146, equal_nan=True)
            expected.copy_(found)
            part = values[chunk * size : (chunk + 1) * size]
            stats = found.float().view(compressor.num_stats, -1)
            codes = torch.zeros(size, dtype=torch.int32)
            codes[: part.numel()] = compressor.codes_reference(part, stats, seed, chunk * size)
            layout.view(want[chunk], "codes").copy_(bitpack.pack(codes, compressor.bits))
    different = (got != want).nonzero()
    assert not different.numel(), (
        f"{len(different)} of {got.numel()} bytes differ, first at [chunk, byte] {different[0].tolist()}: "
        f"{got[tuple(different[0])]:#04x}, not {want[tuple(different[0])]:#04x}"
    )


def expected_residual(
    compressor: Compressor,
    grad: torch.Tensor,
    residual: torch.Tensor,
    payload: torch.Tensor,
    size: int,
    scale: float = 1.0,
) -> torch.Tensor:
    """The new residual that the contract asks for, given the payload that an implementation wrote."""
    values = compressor.accumulate(grad.float(), residual)
    parts = [compressor.decode_reference(chunk, size) / scale for chunk in payload]
    return new_residual(compressor, values, torch.cat(parts)[: grad.numel()], residual)
