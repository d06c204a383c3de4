"""Bytes do not depend on settings of a process or a caller for torch: default dtype, default device, deterministic
mode, autocast, inference mode."""

from __future__ import annotations

import pytest
from configurations import QUICK, parametrize
from units import assert_same, copied, decodings, encodings, recodings

from cases import cases
from gckernels.toolkit.quantizer import MapQuantizer, host
from gckernels.toolkit.quantizer.generated import triton_source
from helpers import HOST, HOST_PARAM, INTERPRETED_SLOWLY, KERNEL_PARAM, REFERENCE_PARAM, number
from process_settings import SETTINGS

SIZES = (0, 33, 5000)


@INTERPRETED_SLOWLY
@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
@parametrize(quick=QUICK)
@cases("setting", SETTINGS)
def test_bytes_are_the_same(compressor, implementation, setting):
    if implementation is not HOST and setting != "everything":
        return
    backend, device, added = implementation.backend(compressor), implementation.device, number(5, implementation.device)
    given = encodings(compressor, device, 2, sizes=SIZES), decodings(compressor, device, 2, 2, sizes=SIZES)
    units = *given, recodings(compressor, device, SIZES)
    units[0][2].grad.fill_(0.5)  # a sample of equal values misleads sparsifiers

    def work(encoded, decoded, recoded) -> None:
        for unit in encoded:
            backend.encode(unit)
        for unit in decoded:
            backend.decode(unit, 1 / 3, True)
        for unit in recoded:
            backend.recode(unit, 1 / 3)
        backend.bind_encodes(encoded, 1.0, added)()
        backend.bind_decodes(decoded, 1 / 3, True)()
        backend.bind_recodes(recoded, 1 / 3, added)()

    one, other = ([copied(each) for each in units] for _ in range(2))
    work(*one)
    with SETTINGS[setting]():
        work(*other)
    for got, want in zip(other, one, strict=True):
        assert_same(got, want)


@cases("setting", SETTINGS)
@parametrize(lambda compressor: isinstance(compressor, MapQuantizer), quick=QUICK)
def test_programs_are_the_same(compressor, setting):
    """The text of what is compiled: a library that is cached serves processes with other settings, too."""
    want = host.program(compressor, False), triton_source(compressor)
    with SETTINGS[setting]():
        assert (host.program(compressor, False), triton_source(compressor)) == want
