"""Machines with different processors give the same bytes, so ranks on them stay equal, bit for bit."""

from __future__ import annotations

import pytest
from configurations import CONFIGURATIONS
from units import assert_same, copied, decodings, encodings, recodings

from helpers import GRADIENTS, HOST, NON_FINITE, number
from host_builds import OLDER, compiled_for

QUICK = ("EFSignSGD", "QSGD", "BlockFP8", "ChunkTopK", "RandomK", "TopK", "Cast16(dtype='float16')")
"""Configurations with the different kinds of arithmetic; all others are slow, because each is compiled."""


@OLDER
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[] if spec in QUICK else [pytest.mark.slow]) for spec in CONFIGURATIONS]
)
def test_an_older_processor_gives_the_same_bytes(spec, processor):
    compressor, added = CONFIGURATIONS[spec], number(5)
    backend = HOST.backend(compressor)
    nasty = list((GRADIENTS | NON_FINITE).values())
    sizes = (1500, *[333] * len(nasty))
    units = encodings(compressor, "cpu", 2, sizes=sizes), decodings(compressor, "cpu", 2, 3, sizes=sizes)
    for unit, make in zip(units[0][1:], nasty, strict=True):
        unit.grad.copy_(make(333))
    given = *units, recodings(compressor, "cpu", sizes)

    def work(encoded, decoded, recoded) -> None:
        backend.bind_encodes(encoded, 1.0, added)()
        backend.bind_decodes(decoded, 1 / 3)()
        backend.bind_recodes(recoded, 1 / 3, added)()

    one, other = ([copied(each) for each in given] for _ in range(2))
    work(*one)
    with compiled_for(processor):
        work(*other)
    for got, want in zip(other, one, strict=True):
        assert_same(got, want)
