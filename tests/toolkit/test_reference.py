"""The reference of feedback and merging works on other devices, which the conformance tests do not cover."""

import pytest
import torch

import gckernels
from gckernels.toolkit import reference


@pytest.mark.parametrize("spec", ["Identity", "Cast16", "BlockQuant(bits=4)", "EFSignSGD"])
def test_references_stay_on_the_device_of_their_arguments(spec):
    compressor = gckernels.from_spec(spec)
    grad, residual = torch.empty(300, device="meta"), torch.empty(300, device="meta")  # mixes with no other device
    payload, left = reference.encode_reference(compressor, grad, residual, chunks=2)
    decoded = reference.decode_reference(compressor, payload[None], grad, scale=0.5, accumulate=True)
    assert {payload.device.type, left.device.type, decoded.device.type} == {"meta"}
