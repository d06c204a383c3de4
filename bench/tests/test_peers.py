"""Quantisers of other packages: they are as precise as they should be, and measured like the package's own."""

from __future__ import annotations

import pytest
import torch

from bench.lib.cases import Case, new_tensors
from bench.lib.peers import PEERS

NUMEL = 2**14


@pytest.mark.parametrize("name", PEERS)
def test_values_come_back_to_half_a_step(name):
    peer = PEERS[name]
    rows = torch.randn(NUMEL).view(-1, peer.length)
    codes, scales = peer.encode(rows)
    assert codes.element_size() == 1 and scales.shape == (rows.shape[0], 1)
    assert codes.numel() + 4 * scales.numel() == peer.encoded_nbytes(NUMEL)
    largest = rows.abs().amax(1, keepdim=True)
    # the mantissa of e4m3 has 3 bits, and int8 has steps of the same size
    bound = largest / 254 if codes.dtype == torch.int8 else rows.abs() / 16 + largest / 448 * 2**-10
    assert torch.all((peer.decode(codes, scales) - rows).abs() <= 1.01 * bound)


def test_rows_of_zeros_stay_zeros():
    for peer in PEERS.values():
        rows = torch.zeros(2, peer.length)
        assert torch.equal(peer.decode(*peer.encode(rows)), rows)


@pytest.mark.parametrize("name", PEERS)
def test_cases_compute_what_they_measure(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    peer, cpu = PEERS[name], torch.device("cpu")
    grad, residual, out = new_tensors(NUMEL, cpu)
    encode, decode = (Case(peer.spec, direction, 1, name, NUMEL) for direction in ("encode", "decode"))
    codes, scales = encode.on((grad, residual, out))()
    decode.on((grad, residual, out))()
    assert torch.equal(out.view(-1, peer.length), peer.decode(codes, scales))
    assert encode.moved_nbytes == decode.moved_nbytes == 4 * NUMEL + peer.encoded_nbytes(NUMEL)
    assert encode.launches() == []
