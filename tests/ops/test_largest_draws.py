"""The largest number that an element can draw does not lift its level above the largest one, whatever the rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gckernels import QSGD, LinearQuant, TernGrad

BLOCK = 128
# the exponent of a block's magnitudes, bits of the largest element's mantissa, and of the others beside it
EXPONENTS = st.one_of(st.integers(-149, 127), st.sampled_from([-126, -100, -50, -49, 0, 62, 63, 126, 127]))


def codes(compressor, values: torch.Tensor, draw: int = 2**16 - 1) -> torch.Tensor:
    statistics = compressor.statistics_reference(values, values.numel())
    each = tuple(stat.repeat_interleave(compressor.block)[: values.numel()] for stat in statistics)
    dither = torch.full_like(values, compressor.maps.dither_base + draw / 2**16)
    return torch.where(each[0].isnan(), 0, compressor.maps.quantize(values, each, dither, compressor.constants))


@pytest.mark.parametrize(
    "compressor",
    [
        *(QSGD(levels=levels) for levels in (1, 2, 3, 4, 7, 8, 127)),
        *(LinearQuant(bits=bits, stochastic=True, block=BLOCK) for bits in (1, 2, 4)),
        *(TernGrad(clip=clip) for clip in (None, 0.1)),
    ],
    ids=repr,
)
@settings(max_examples=15)
@given(exponent=EXPONENTS, mantissas=st.lists(st.integers(0, 2**23 - 1), min_size=64, max_size=64))
def test_levels_stay_below_the_next_integer(compressor, exponent, mantissas):
    largest = (1 + torch.tensor(mantissas, dtype=torch.float64) * 2.0**-23) * 2.0**exponent
    blocks = torch.zeros(2 * largest.numel(), BLOCK, dtype=torch.float64)
    blocks[:64, 0] = largest  # alone in its block, so that its level is the largest one
    blocks[64:, 0] = -largest
    blocks[::3, 1] = -blocks[::3, 0] * 2.0**-13
    found = codes(compressor, blocks.to(torch.float32).flatten())
    assert found.min() >= 0
    if isinstance(compressor, QSGD):
        found = found & (compressor.constants.sign - 1)
        assert found.max() <= compressor.levels
    elif isinstance(compressor, TernGrad):
        assert found.max() <= 2
        drawn = torch.stack([found, codes(compressor, blocks.to(torch.float32).flatten(), 0)]).view(2, -1, BLOCK)[
            :, :, 0
        ]
        if exponent >= -100:  # clipped, those below -119 decode to 0
            assert torch.equal(drawn[:, :64], torch.full((2, 64), 2, dtype=torch.int32))
            assert torch.equal(drawn[:, 64:], torch.zeros(2, 64, dtype=torch.int32))
    else:
        assert found.max() <= compressor.constants.largest
