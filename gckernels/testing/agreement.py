"""When two implementations of a compressor agree: equal to the last bit, but for sums, which have a bound.

The conformance tests judge the host path and the kernels by it, and ``make gpu-light`` the kernels by the host path.
"""

from __future__ import annotations

import torch

from gckernels import Compressor
from gckernels.toolkit import bitpack
from gckernels.toolkit.quantizer import SUM, MapQuantizer
from gckernels.toolkit.reference import new_residual


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
        assert isinstance(compressor, MapQuantizer)
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
