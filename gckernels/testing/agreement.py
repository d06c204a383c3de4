"""Comparison of two implementations of a compressor: bit for bit, except sums, which have an error bound.

The conformance tests compare the host path and the kernels with the reference, and ``make gpu-light`` compares the
kernels with the host path.
"""

from __future__ import annotations

import torch

from gckernels import Codec
from gckernels.toolkit import bitpack
from gckernels.toolkit.quantizer import SUM, MapQuantizer
from gckernels.toolkit.reference import new_residual


def _longest_chain(numel: int) -> int:
    """The maximum number of additions that a term of a sum of ``numel`` terms passes, over all implementations."""
    # torch adds in four levels of at most 16 steps (for up to 2 million elements), then 8 lanes. The host path adds a
    # tile of 16384 elements in 8 lanes or more, and tiles in fp64. The kernel halves a tile of 4096, adds tiles one by
    # one into 1024 sums, and halves those.
    return max(4 * 16 + 8, 16384 // 8 + 8, 12 + numel // (1024 * 4096) + 10)


def has_sums(compressor: Codec) -> bool:
    """Whether the statistics contain sums, whose terms every implementation adds in a different order.

    All terms of a sum have the same sign, so its relative error is at most one rounding per addition, and a few more
    for the operations on the sum.
    """
    return isinstance(compressor, MapQuantizer) and SUM in getattr(compressor.maps.statistic, "kinds", ())


def assert_payloads_equal(
    compressor: Codec,
    size: int,
    got: torch.Tensor,
    want: torch.Tensor,
    values: torch.Tensor,
    seed: int = 0,
) -> None:
    """Assert that payloads ``[chunks, nbytes]`` of ``values [numel]`` are equal byte by byte.

    Sums must be equal up to an error bound; the codes must then be those that follow from the sums in ``got``.
    """
    if has_sums(compressor):
        assert isinstance(compressor, MapQuantizer)
        layout = compressor.layout(size)
        want = want.clone()
        # both results have a rounding per addition, and one each for the term, a division and a root
        rtol = 2 * (_longest_chain(size) + 4) * 2.0**-24
        for chunk in range(want.shape[0]):
            actual, expected = layout.view(got[chunk], "stats"), layout.view(want[chunk], "stats")
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=2.0**-146, equal_nan=True)
            expected.copy_(actual)
            part = values[chunk * size : (chunk + 1) * size]
            stats = actual.float().view(compressor.num_stats, -1)
            codes = torch.zeros(size, dtype=torch.int32, device="cpu")
            codes[: part.numel()] = compressor.codes_reference(part, stats, seed, chunk * size)
            layout.view(want[chunk], "codes").copy_(bitpack.pack(codes, compressor.bits))
    different = (got != want).nonzero()
    assert not different.numel(), (
        f"{len(different)} of {got.numel()} bytes differ, first at [chunk, byte] {different[0].tolist()}: "
        f"{got[tuple(different[0])]:#04x}, not {want[tuple(different[0])]:#04x}"
    )


def expected_residual(
    compressor: Codec,
    grad: torch.Tensor,
    residual: torch.Tensor,
    payload: torch.Tensor,
    size: int,
    scale: float = 1.0,
) -> torch.Tensor:
    """The new residual that the contract requires for the payload of an implementation."""
    values = compressor.accumulate(grad.float(), residual)
    parts = [compressor.decode_reference(chunk, size) / scale for chunk in payload]
    return new_residual(compressor, values, torch.cat(parts)[: grad.numel()], residual)
