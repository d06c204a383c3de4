"""No byte depends on arithmetic that is left open: roots of torch, which are not correctly rounded on all machines, and
NaN that is converted to an integer."""

from __future__ import annotations

import torch
from configurations import parametrize

from gckernels.toolkit.host import c_forms
from gckernels.toolkit.kernels import triton_forms
from gckernels.toolkit.lowering import FLOAT, INT
from gckernels.toolkit.quantizer import MapQuantizer, host
from gckernels.toolkit.quantizer.generated import triton_source
from helpers import REFERENCE, assert_equal, encode, random_residual

QUANTIZERS = parametrize(lambda compressor: isinstance(compressor, MapQuantizer))


@QUANTIZERS
def test_references_take_no_roots_of_torch(compressor, monkeypatch):
    grad, residual = torch.randn(3000), random_residual(compressor, 3000)
    want = encode(REFERENCE, compressor, grad, residual)
    root = torch.Tensor.sqrt

    def off(x: torch.Tensor) -> torch.Tensor:
        return root(x).nextafter(torch.tensor(torch.inf)) if x.dtype == torch.float32 else root(x)

    monkeypatch.setattr(torch.Tensor, "sqrt", off)
    monkeypatch.setattr(torch, "sqrt", off)
    for got, expected in zip(encode(REFERENCE, compressor, grad, residual), want, strict=True):
        assert_equal(got, expected)


@QUANTIZERS
def test_no_number_is_converted_to_an_integer(compressor, monkeypatch):
    """A conversion would have to be guarded against NaN, which costs more than to add a power of two and to take the
    lowest bits of the sum."""

    def refusing(form):
        def checked(kind, wide, x, *more, **named):
            assert (kind, x.kind) != (INT, FLOAT), "converted"
            return form(kind, wide, x, *more, **named)

        return checked

    for module in (c_forms, triton_forms):
        for name in ("to", "int"):
            monkeypatch.setitem(module.FORMS, name, refusing(module.FORMS[name]))
    for merging in (False, True):
        host.program(compressor, merging)
    triton_source(compressor)
