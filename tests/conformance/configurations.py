"""What the conformance suite runs over: every registered compressor, and what it must know about some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import gckernels
from gckernels import COMPRESSORS, Compressor
from gckernels.toolkit import host

EXTRA = (
    "BlockQuant(bits=4)",
    "BlockQuant(bits=4, block=32, scale_dtype='bfloat16')",
    "Cast16(dtype='float16')",
    "ChunkTopK(chunk=64, k=8, value_bits=8)",
    "ChunkTopK(chunk=1024, k=40, value_bits=4)",
    "ChunkTopK(chunk=256, k=16, value_bits=2)",
    "EFSignSGD(block=128)",
    "EFSignSGD(block=1024)",
)
"""Configurations besides the default one of every class, which is always there."""

DEFAULTS: dict[str, Compressor] = {name: cls() for name, cls in sorted(COMPRESSORS.items())}
CONFIGURATIONS = DEFAULTS | {spec: gckernels.from_spec(spec) for spec in EXTRA}


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


STATED_NBYTES: dict[str, Callable[[Compressor, int], int]] = {
    "BlockQuant": lambda c, n: 16 + _field(_ceil(n, c.block) * c.scale_dtype.itemsize) + _field(_ceil(n * c.bits, 8)),
    "Cast16": lambda c, n: max(16, _field(2 * n)),
    "ChunkTopK": _chunk_top_k_nbytes,
    "EFSignSGD": lambda c, n: 16 + _field(4 * (1 if c.block is None else _ceil(n, c.block))) + _field(_ceil(n, 8)),
    "Identity": lambda c, n: max(16, _field(4 * n)),
}
"""Payload size by class name, written down a second time from the wire format in each module's docstring."""


# -------------------------------------------------------------------- what need not be equal to the last bit


@dataclass(frozen=True)
class Sum:
    """A payload field that holds a sum, whose terms every implementation adds in an order of its own."""

    field: str
    longest_chain: Callable[[int], int]  # additions that a term can pass through, for that many elements


def _chain(numel: int) -> int:
    # torch adds in four levels of at most 16 steps (for up to 2 million elements) and 8 lanes after that; NumPy, tile
    # by tile, in fewer steps; the kernel halves a tile of 2048, adds tiles one by one into 256 sums, and halves those
    return 4 * 16 + 8 + numel // host.TILE_NUMEL


SUMS = {"EFSignSGD": Sum("stats", _chain)}
"""By class name. Terms are not negative, so the relative error is at most one rounding per addition."""

AMBIGUOUS_WHEN_RANDOM = {
    "ChunkTopK": "an index that occurs twice in a group, which no encoder writes, may count once or twice",
}
"""Classes whose random payloads may decode to different values in different implementations, and why."""


def assert_payloads_equal(compressor: Compressor, size: int, got: torch.Tensor, want: torch.Tensor) -> None:
    """Bytes equal, but for sums, which are equal to a bound."""
    got = got.clone()
    if compressor.name in SUMS:
        inexact = SUMS[compressor.name]
        layout = compressor.layout(size)
        got_sum, want_sum = layout.view(got, inexact.field), layout.view(want, inexact.field)
        # two results, each with a rounding per addition and one for a division
        rtol = 2 * (inexact.longest_chain(size) + 1) * 2.0**-24
        torch.testing.assert_close(got_sum, want_sum, rtol=rtol, atol=2.0**-148, equal_nan=True)
        got_sum.copy_(want_sum)
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
    values = grad.float() + residual
    parts = [compressor.decode_reference(chunk, size) / scale for chunk in payload]
    left = values - torch.cat(parts)[: values.numel()]
    return torch.where(torch.isfinite(left), left, residual)
