"""The examples in the modules' docstrings, worked out by hand, are right in every byte."""

from __future__ import annotations

import pytest
import torch
from configurations import OURS

from gckernels import CODECS
from gckernels.testing.documented import examples
from helpers import HOST_PARAM, KERNEL_PARAM, REFERENCE_PARAM, decode, encode, zero_residual

EXAMPLES = {name: examples(CODECS[name]) for name in sorted(OURS)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_compressor_has_an_example(name):
    assert EXAMPLES[name], f"work an example of {name} out by hand, in the docstring of its module"


@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
@pytest.mark.parametrize(
    "example", [pytest.param(one, id=str(one.compressor)) for all in EXAMPLES.values() for one in all]
)
def test_example(example, implementation):
    assert len(example.values) <= 16
    compressor = example.compressor
    values, decoded = torch.tensor(example.values), torch.tensor(example.decoded)
    payload, residual = encode(implementation, compressor, values, zero_residual(compressor, values.numel()))
    assert payload[0].numpy().tobytes().hex(" ").upper() == example.payload.hex(" ").upper()
    assert decode(implementation, compressor, payload, torch.empty_like(values)).tolist() == decoded.tolist()
    stated = None if example.residual is None else torch.tensor(example.residual)
    if not compressor.traits.conserves:
        assert residual.tolist() == stated.tolist()
        return
    assert residual.tolist() == (values - decoded).tolist()
    if stated is not None:  # the docstring says 0.4 for 4 - 3.6, which is not the fp32 number nearest to 0.4
        torch.testing.assert_close(residual, stated, rtol=1e-6, atol=0)
