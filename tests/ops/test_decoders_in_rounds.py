"""Decoders whose scratch has room for fewer programs than a unit takes: programs work on several tiles each."""

from __future__ import annotations

import pytest
import torch

from gckernels import ChunkTopK, RandomK, chunk_numel
from gckernels.codec import Decoding
from gckernels.ops import chunktopk, randomk
from gckernels.ops.chunktopk import launchers as chunktopk_launchers
from gckernels.ops.randomk import launchers as randomk_launchers
from gckernels.toolkit.kernels.launch import record_launches
from helpers import HOST, KERNEL_PARAM, assert_equal, decode, encode

CASES = [
    pytest.param(ChunkTopK(chunk=1024, k=32), chunktopk_launchers, id=chunktopk.__name__),
    pytest.param(RandomK(0.05), randomk_launchers, id=randomk.__name__),
]
NUMEL, CHUNKS, SOURCES = 22_000, 2, 2


@pytest.mark.parametrize(("compressor", "launchers"), CASES)
@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@pytest.mark.parametrize("units", [1, 2], ids=["one unit", "shared"])
def test_results_do_not_depend_on_the_scratch(implementation, compressor, launchers, units, monkeypatch):
    size = chunk_numel(NUMEL, CHUNKS)
    grads = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) for seed in range(SOURCES)]
    payloads = torch.stack([encode(HOST, compressor, grad, None, chunks=CHUNKS, seed=3)[0] for grad in grads])
    want = decode(HOST, compressor, payloads, torch.empty(NUMEL))
    monkeypatch.setattr(launchers, "_SCRATCH_NUMEL", 4 * 4096)
    given = payloads.to(implementation.device)
    outs = [torch.empty(NUMEL, device=implementation.device) for _ in range(units)]
    work = compressor.triton.bind_decodes([Decoding(compressor, given, out, size) for out in outs])
    with record_launches() as recorded:
        work()
    assert [launch.constexprs["C"].loops for launch in recorded] == [True]
    work()
    for out in outs:
        assert_equal(out.cpu(), want)
