"""Many payloads merge into one result, and one unit may have many chunks."""

from __future__ import annotations

import pytest
import torch
from configurations import INTERPRETED_IN_KINDS, QUICK, assert_payloads_equal, parametrize

from cases import cases
from gckernels import chunk_numel
from gckernels.toolkit.reference import last_state
from helpers import (
    HOST_PARAM,
    INTERPRETED_SLOWLY,
    KERNEL_PARAM,
    REFERENCE,
    assert_equal,
    decode,
    decode_one,
    encode,
    random_residual,
    recode,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])


@IMPLEMENTATIONS
@parametrize()
@cases(
    ("sources", "chunks"),
    [pytest.param(1, 1, marks=INTERPRETED_IN_KINDS), (2, 3), pytest.param(5, 1, marks=INTERPRETED_SLOWLY)],
)
def test_merging_is_the_mean_of_the_decodings(compressor, implementation, sources, chunks):
    numel = 700
    payloads = torch.stack(
        [encode(REFERENCE, compressor, torch.randn(numel), None, chunks, seed=source)[0] for source in range(sources)]
    )
    total = torch.zeros(numel)
    for payload in payloads:  # in source order and in fp32, so the result is equal to the last bit
        total = total + decode_one(compressor, payload, numel)
    out = torch.randn(numel)
    mean = compressor.merge(total, 1 / sources)
    assert_equal(decode(implementation, compressor, payloads, out, scale=1 / sources), mean)
    added = decode(implementation, compressor, payloads, out, scale=1 / sources, accumulate=True)
    assert_equal(added, mean + out)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
def test_no_payloads_decode_to_zero(compressor, implementation):
    nothing = torch.empty(0, 1, compressor.payload_nbytes(20), dtype=torch.uint8)
    out = torch.randn(20)
    assert_equal(decode(implementation, compressor, nothing, out), torch.zeros(20))
    assert_equal(decode(implementation, compressor, nothing, out, accumulate=True), out)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
def test_a_payload_may_stand_for_several_sources(compressor, implementation):
    """Expanded views, whose stride is 0, are read correctly."""
    payload, _ = encode(REFERENCE, compressor, torch.randn(50))
    size = 50
    one = payload[None].to(implementation.device)
    out = torch.empty(50, device=implementation.device)
    implementation.decode(compressor, one.expand(3, -1, -1), out, size)
    single = decode_one(compressor, payload, 50)
    assert_equal(out.cpu(), compressor.merge(single + single + single, 1.0))


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
@cases("numel", [1000, 40])
def test_chunks_are_the_parts_encoded_separately(compressor, implementation, numel):
    """Each chunk equals the same part encoded at its position: random numbers belong to elements of the unit, not of
    the chunk."""
    chunks, seed = 4, 5
    size = chunk_numel(numel, chunks)
    grad, residual = torch.randn(numel), random_residual(compressor, numel)
    payload, kept = encode(implementation, compressor, grad, residual, chunks, seed)
    parts = [slice(chunk * size, (chunk + 1) * size) for chunk in range(chunks)]
    if compressor.traits.stochastic:
        values = last_state(compressor.accumulate(grad, residual), numel)
        alone = [compressor.encode_reference(values[part], size, seed, part.start) for part in parts]
        assert_payloads_equal(compressor, size, payload, torch.stack(alone), values, seed)
    else:
        for chunk, part in enumerate(parts):
            mine = torch.cat([state[part] for state in residual.split(numel)])
            alone, left = encode(implementation, compressor, grad[part], mine, 1, seed, size=size)
            assert torch.equal(payload[chunk], alone[0])
            assert_equal(torch.cat([state[part] for state in kept.split(numel)]), left, "residual")
    whole = decode_one(compressor, payload, numel)
    decoded = [decode_one(compressor, payload[chunk : chunk + 1], size) for chunk in range(chunks)]
    assert_equal(torch.cat(decoded)[:numel], whole)


@INTERPRETED_IN_KINDS
@IMPLEMENTATIONS
@parametrize(quick=QUICK)
@cases(
    ("sources", "numel", "size", "feedback"),
    [
        (3, 700, 700, True),
        (2, 90, 112, False),
        *(pytest.param(*each, marks=INTERPRETED_SLOWLY) for each in ((3, 700, 700, False), (2, 90, 112, True))),
        *((1, 0, 16, feedback) for feedback in (True, False)),
    ],
)
def test_recoding_is_decoding_and_encoding(compressor, implementation, sources, numel, size, feedback):
    """One call gives the same bits, also for the short last shard; shards are encoded by ``shard_compressor``."""
    payloads = torch.stack(
        [encode(REFERENCE, compressor, torch.randn(numel), None, 1, source, size=size)[0] for source in range(sources)]
    )
    merged = decode(implementation, compressor, payloads, torch.empty(numel), scale=1 / sources, size=size)
    residual = random_residual(compressor.shard_compressor, numel) if feedback else None
    want, left = encode(implementation, compressor.shard_compressor, merged, residual, 1, 5, size=size)
    got, kept = recode(implementation, compressor, payloads[:, 0], residual, numel, 1 / sources, 5, size)
    assert torch.equal(got, want[0])
    if feedback:
        assert_equal(kept, left, "residual")
