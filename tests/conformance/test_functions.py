"""The functions ``gckernels.encode``, ``decode`` and ``recode`` do the same as the methods, for any shape."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from configurations import DEFAULTS, for_each, parametrize

import gckernels
from cases import cases
from gckernels import CODECS, COMPRESSORS, BlockQuant, EFSignSGD, PowerSGD, chunk_numel, register
from gckernels.registration import define_ops
from helpers import HOST, assert_equal, decode, encode, recode, zero_residual

VERBS = ("encode", "decode", "recode")
SHAPES = [(), (0,), (7,), (0, 3), (3, 5), (4, 17, 30)]


def functions(compressor):
    """The functions ``(encode, decode, recode)``, bound to this compressor."""
    return tuple(functools.partial(getattr(gckernels, verb), compressor) for verb in VERBS)


def test_compressors_of_users_are_encoded():
    @register
    @dataclasses.dataclass(frozen=True)
    class OfAUser(EFSignSGD):
        pass

    try:
        grad = torch.randn(100)
        assert torch.equal(gckernels.encode(OfAUser(), grad), gckernels.encode(EFSignSGD(), grad))
    finally:
        del CODECS["OfAUser"], COMPRESSORS["OfAUser"]


@pytest.mark.parametrize("field", ["seed", "out", "size"])
def test_fields_cannot_be_named_like_arguments(field):
    cls = dataclasses.make_dataclass("Clashing", [(field, "int", 1)], bases=(EFSignSGD,), frozen=True)
    with pytest.raises(TypeError, match=rf"Clashing\.{field}"):
        define_ops(cls)


# -------------------------------------------------------------------- results


@cases("chunks", [1, 3])
@cases("shape", SHAPES)
@parametrize(among=DEFAULTS)
def test_any_shape(compressor, shape, chunks):
    """The results equal those of the host path for the same elements as a vector."""
    encode_it, decode_it, _ = functions(compressor)
    grad, states = torch.randn(shape), compressor.traits.states
    residual = torch.randn(shape if states == 1 else (states, *shape))
    payload, left = encode(HOST, compressor, grad.view(-1), residual.view(-1), chunks, seed=5)
    kept = residual.clone()
    got = encode_it(grad, kept, chunks=chunks, seed=5)
    assert torch.equal(got, payload if chunks > 1 else payload[0])
    assert_equal(kept.view(-1), left)

    decoded = decode_it(got, shape, chunks=chunks)
    want = decode(HOST, compressor, payload, torch.empty(grad.numel()))
    assert decoded.dtype == torch.float32
    assert_equal(decoded, want.view(shape))
    assert_equal(decode_it(got, math.prod(shape), chunks=chunks), want)


@for_each()
def test_every_configuration(compressor):
    """All fields of a configuration reach encode, decode and recode."""
    encode_it, decode_it, recode_it = functions(compressor)
    grads = torch.randn(2, 3000)
    payloads = torch.stack([encode_it(grad) for grad in grads])
    assert torch.equal(payloads[0], encode(HOST, compressor, grads[0])[0][0])
    merged = decode_it(payloads, 3000, scale=0.5)
    assert_equal(merged, decode(HOST, compressor, payloads[:, None], torch.empty(3000), 0.5))

    residual = torch.randn(compressor.shard_compressor.traits.states, 30, 100)
    want, left = recode(HOST, compressor, payloads, residual.view(-1), 3000, 0.5, 7)
    assert torch.equal(recode_it(payloads, residual, 3000, scale=0.5, seed=7), want)
    assert_equal(residual.view(-1), left)
    want, _ = recode(HOST, compressor, payloads, None, 2990, 1.0, 0, 3000)
    assert torch.equal(recode_it(payloads, None, 2990, size=3000), want)


@cases("dtype", [torch.float32, torch.bfloat16, torch.float16])
@parametrize(among=DEFAULTS)
def test_output(compressor, dtype):
    """The output is a new tensor of any dtype, or a given one that is overwritten or added to, and returned."""
    encode_it, decode_it, _ = functions(compressor)
    grad = torch.randn(6, 50).to(dtype)
    payload = encode_it(grad)
    want = decode(HOST, compressor, payload, torch.empty(300, dtype=dtype)).view(6, 50)
    assert_equal(decode_it(payload, grad.shape, out_dtype=dtype), want)
    out = torch.empty(6, 50, dtype=dtype)
    assert decode_it(payload, out=out) is out
    assert_equal(out, want)
    before = torch.randn(6, 50).to(dtype)
    out = before.clone()
    assert decode_it(payload, [6, 50], out=out, out_dtype=dtype, accumulate=True) is out
    assert_equal(out.view(-1), decode(HOST, compressor, payload, before.view(-1), accumulate=True))


@parametrize(among=DEFAULTS)
def test_a_small_unit_in_chunks(compressor):
    """Payloads of chunks can be as large as the whole unit's; ``chunks`` says that they are not sources."""
    encode_it, decode_it, _ = functions(compressor)
    payload = encode_it(torch.randn(20), chunks=2)
    want = decode(HOST, compressor, payload[None], torch.empty(20))
    assert_equal(decode_it(payload, 20, chunks=2), want)
    assert_equal(decode_it(payload[None], 20, chunks=2), want)
    assert_equal(decode_it(payload[None], 20), want)


@parametrize(among=DEFAULTS)
def test_an_average_over_ranks(compressor):
    """The example of ``docs/operators.md``: an all-to-all, each rank's merging and encoding of its shard, an
    all-gather."""
    encode_it, decode_it, recode_it = functions(compressor)
    world, numel = 3, 100
    grads = torch.randn(world, numel)
    size = chunk_numel(numel, world)
    sent = torch.stack([encode_it(grad, chunks=world) for grad in grads])  # [rank, chunk, nbytes]
    shards, merged = [], []
    for rank in range(world):
        owned = min(size, numel - rank * size)
        shards.append(
            recode_it(
                sent[:, rank], zero_residual(compressor.shard_compressor, owned), owned, scale=1 / world, size=size
            )
        )
        merged.append(decode_it(sent[:, rank], owned, scale=1 / world, size=size))
    average = decode_it(torch.stack(shards), numel, chunks=world)
    assert_equal(torch.cat(merged), decode_it(sent, numel, scale=1 / world))
    for rank, shard in enumerate(shards):
        one = decode_it(shard, len(merged[rank]), size=size)
        assert_equal(average[rank * size : rank * size + size], one)


# -------------------------------------------------------------------- errors

GRAD = torch.zeros(4, 6)
COMPRESSOR = BlockQuant()
PAYLOAD = gckernels.encode(COMPRESSOR, GRAD)
ENCODE_FAULTS = {
    "not_a_tensor": (TypeError, "grad", {"grad": [1.0]}),
    "integers": (TypeError, "grad", {"grad": GRAD.int()}),
    "transposed": (ValueError, "grad", {"grad": GRAD.T}),
    "sparse": (ValueError, "grad", {"grad": GRAD.to_sparse()}),
    "residual_not_a_tensor": (TypeError, "residual", {"residual": 0.0}),
    "residual_bf16": (TypeError, "residual", {"residual": GRAD.bfloat16()}),
    "residual_transposed": (ValueError, "residual", {"residual": torch.zeros(6, 4).T}),
    "residual_flat": (ValueError, "residual", {"residual": torch.zeros(24)}),
    "residual_elsewhere": (ValueError, "residual", {"residual": GRAD.to("meta")}),
    "no_chunks": (ValueError, "chunks", {"chunks": 0}),
    "too_small": (ValueError, "size", {"size": 20}),
    "negative_size": (ValueError, "size", {"size": -1000}),
    "scaled": (ValueError, "scale", {"scale": 0.5}),
    "a_class": (TypeError, "compressor.*the class BlockQuant", {"compressor": BlockQuant}),
    "a_name": (TypeError, "compressor.*got str", {"compressor": "BlockQuant"}),
    "no_codec": (TypeError, "compressor.*got PowerSGD", {"compressor": PowerSGD()}),
    "unknown": (TypeError, "blok", {"blok": 64}),
}
DECODE_FAULTS = {
    "floats": (TypeError, "payloads", {"payloads": PAYLOAD.float()}),
    "too_short": (ValueError, "payloads", {"payloads": PAYLOAD[:-16]}),
    "other_chunks": (ValueError, "payloads", {"payloads": PAYLOAD[None], "chunks": 2}),
    "one_chunk": (ValueError, "payloads", {"chunks": 2}),
    "no_shape": (TypeError, "shape", {"shape": None}),
    "other_shape": (ValueError, "out.* shape", {"out": torch.zeros(6, 4)}),
    "other_numel": (ValueError, "payloads", {"shape": 2400}),
    "nothing_to_add_to": (ValueError, "accumulate", {"accumulate": True}),
    "out_dtype": (TypeError, "out", {"out_dtype": torch.float64}),
    "two_dtypes": (TypeError, "out_dtype", {"out": torch.zeros(4, 6), "out_dtype": torch.float16}),
    "out_transposed": (ValueError, "out", {"out": torch.zeros(6, 4).T}),
    "a_class": (TypeError, "compressor", {"compressor": BlockQuant}),
}
RECODE_FAULTS = {
    "one_source": (ValueError, "payloads", {"payloads": PAYLOAD}),
    "negative": (ValueError, "numel", {"numel": -1000}),
    "other_numel": (ValueError, "residual", {"numel": 23}),
    "residual_transposed": (ValueError, "residual", {"residual": torch.zeros(6, 4).T}),
    "too_small": (ValueError, "size", {"size": 20}),
    "a_class": (TypeError, "compressor", {"compressor": BlockQuant}),
}


def _refused(function, arguments: dict, fault: tuple) -> None:
    error, argument, spoiled = fault
    arguments = {name: value.clone() if torch.is_tensor(value) else value for name, value in arguments.items()}
    before = {name: value.clone() for name, value in arguments.items() if torch.is_tensor(value)}
    with pytest.raises(error, match=argument):
        function(**arguments | spoiled)
    for name, value in before.items():
        assert torch.equal(arguments[name], value), name


@pytest.mark.parametrize("fault", ENCODE_FAULTS.values(), ids=ENCODE_FAULTS)
def test_encode_refuses(fault):
    _refused(gckernels.encode, {"compressor": COMPRESSOR, "grad": GRAD + 1, "residual": GRAD + 1}, fault)


@pytest.mark.parametrize("fault", DECODE_FAULTS.values(), ids=DECODE_FAULTS)
def test_decode_refuses(fault):
    _refused(gckernels.decode, {"compressor": COMPRESSOR, "payloads": PAYLOAD, "shape": (4, 6)}, fault)


@pytest.mark.parametrize("fault", RECODE_FAULTS.values(), ids=RECODE_FAULTS)
def test_recode_refuses(fault):
    arguments = {"compressor": COMPRESSOR, "payloads": PAYLOAD[None], "residual": GRAD.flatten() + 1, "numel": 24}
    _refused(gckernels.recode, arguments, fault)
