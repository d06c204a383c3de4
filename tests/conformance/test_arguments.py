"""The torch ops check their arguments before anything is changed, and pass torch's own checks."""

from __future__ import annotations

import pytest
import torch
from configurations import DEFAULTS, ONE_OF_EACH_KIND, for_each, parametrize

from cases import cases
from gckernels import chunk_numel
from helpers import HOST, assert_equal, decode, encode, random_residual

NUMEL, CHUNKS = 10_000, 2  # for every compressor, a chunk's payload is smaller than that of the whole unit
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def encode_arguments(compressor, device="cpu") -> dict:
    nbytes = compressor.payload_nbytes(chunk_numel(NUMEL, CHUNKS))
    return {
        "grad": torch.randn(NUMEL, device=device),
        "residual": random_residual(compressor, NUMEL).to(device),
        "payload": torch.full((CHUNKS, nbytes), 0xCD, dtype=torch.uint8, device=device),
    }


def decode_arguments(compressor, device="cpu") -> dict:
    payload, _ = encode(HOST, compressor, torch.randn(NUMEL), None, CHUNKS)
    return {"payloads": payload[None].repeat(3, 1, 1).to(device), "out": torch.randn(NUMEL, device=device)}


def recode_arguments(compressor, device="cpu") -> dict:
    payload, _ = encode(HOST, compressor, torch.randn(NUMEL))
    return {
        "payloads": payload.repeat(3, 1).to(device),
        "residual": random_residual(compressor.shard_compressor, NUMEL).to(device),
        "payload": torch.full_like(payload[0], 0xCD, device=device),
    }


def _misaligned(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    buffer = torch.zeros(tensor.numel() + 64, dtype=tensor.dtype)
    return buffer[offset : offset + tensor.numel()].view(tensor.shape)


def _rows_apart(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """A tensor of the same shape whose rows, along the last dimension, are ``gap`` elements further apart."""
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + gap, dtype=tensor.dtype)[..., : -gap or None]


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)[..., ::2]


VECTOR = {
    "wrong_dtype": (TypeError, lambda t: t.double()),
    "integer": (TypeError, lambda t: t.int()),
    "matrix": (ValueError, lambda t: t.view(10, -1)),
    "scalar": (ValueError, lambda t: t[0]),
    "non_contiguous": (ValueError, _strided),
    "expanded": (ValueError, lambda t: t[:1].expand(t.numel())),
    "other_device": (ValueError, lambda t: t.to("meta")),
}
BYTES = {
    "wrong_dtype": (TypeError, lambda t: t.to(torch.int8)),
    "floats": (TypeError, lambda t: t.float()),
    "scalar": (ValueError, lambda t: t.flatten()[0]),
    "four_dimensions": (ValueError, lambda t: t[(None,) * (4 - t.dim())]),
    "too_short": (ValueError, lambda t: t[..., :-16]),
    "too_long": (ValueError, lambda t: torch.cat([t, t[..., :16]], -1)),
    "no_chunks": (ValueError, lambda t: t[..., :0, :]),
    "another_number_of_chunks": (ValueError, lambda t: t[..., :1, :]),
    "non_contiguous": (ValueError, _strided),
    "transposed": (ValueError, lambda t: t.mT.contiguous().mT),
    "misaligned": (ValueError, lambda t: _misaligned(t, 8)),
    "rows_misaligned": (ValueError, lambda t: _rows_apart(t, 8)),
    "other_device": (ValueError, lambda t: t.to("meta")),
}
ENCODE_FAULTS = [
    *(("grad", name, *fault) for name, fault in VECTOR.items()),
    *(("residual", name, *fault) for name, fault in VECTOR.items()),
    ("residual", "wrong_size", ValueError, lambda t: t[:-1]),
    ("residual", "bf16", TypeError, lambda t: t.bfloat16()),
    *(("payload", name, *fault) for name, fault in BYTES.items()),
]
DECODE_FAULTS = [
    *(("out", name, *fault) for name, fault in VECTOR.items()),
    *(("payloads", name, *fault) for name, fault in BYTES.items()),
]


def check_refused(call, arguments: dict, argument: str, error: type[Exception]) -> None:
    """Assert that ``call`` raises an error that names the argument, and changes nothing."""
    before = {name: value.clone() for name, value in arguments.items()}
    with pytest.raises(error, match=rf"\b{argument}\b"):
        call(**arguments)
    for name, value in arguments.items():
        if value.device.type != "meta":
            assert torch.equal(value, before[name]), name


@cases(
    ("argument", "error", "spoil"),
    [pytest.param(argument, *rest, id=f"{argument}-{name}") for argument, name, *rest in ENCODE_FAULTS],
)
@parametrize(among=DEFAULTS)
def test_encode_refuses(compressor, argument, error, spoil):
    arguments = encode_arguments(compressor)
    if argument == "grad":  # the residual must not be at fault, too
        arguments.pop("residual")
        arguments["residual"] = None
        spoiled = spoil(arguments["grad"])
        before = arguments["payload"].clone()
        with pytest.raises(error, match=r"\b(grad|payload)\b" if spoiled.is_meta else r"\bgrad\b"):
            compressor.encode(spoiled, None, arguments["payload"])
        assert torch.equal(arguments["payload"], before)
    else:
        arguments[argument] = spoil(arguments[argument])
        check_refused(compressor.encode, arguments, argument, error)


@cases(
    ("argument", "error", "spoil"),
    [pytest.param(argument, *rest, id=f"{argument}-{name}") for argument, name, *rest in DECODE_FAULTS],
)
@parametrize(among=DEFAULTS)
def test_decode_refuses(compressor, argument, error, spoil):
    arguments = decode_arguments(compressor)
    arguments[argument] = spoil(arguments[argument])
    named = "out|payloads" if arguments[argument].is_meta else argument  # either may be named if the devices differ
    check_refused(compressor.decode, arguments, f"({named})", error)


@for_each()
def test_size_too_small_is_refused(compressor):
    arguments = encode_arguments(compressor)
    check_refused(lambda **given: compressor.encode(**given, size=NUMEL // CHUNKS - 1), arguments, "size", ValueError)
    arguments = decode_arguments(compressor)
    check_refused(lambda **given: compressor.decode(**given, size=NUMEL // CHUNKS - 1), arguments, "size", ValueError)


@for_each(lambda compressor: not compressor.traits.summable)
def test_scale_is_for_summable_compressors(compressor):
    arguments = encode_arguments(compressor)
    check_refused(lambda **given: compressor.encode(**given, scale=0.5), arguments, "scale", ValueError)


@DEVICES
@for_each()
def test_the_dispatcher_chooses(compressor, device):
    """The methods and the ops give the same results, on the path that the device selects."""
    arguments = encode_arguments(compressor, device)
    want, left = encode(HOST, compressor, arguments["grad"].cpu(), arguments["residual"].cpu(), CHUNKS)
    compressor.encode(**arguments)
    op = getattr(torch.ops.gckernels, f"{compressor.op_name}_encode")
    again = encode_arguments(compressor, device) | {"grad": arguments["grad"], "residual": left.to(device)}
    again["residual"].copy_(arguments["residual"])
    if device == "cpu":
        assert torch.equal(arguments["payload"], want)
        assert_equal(arguments["residual"], left)

    arguments["residual"] = None
    compressor.encode(**arguments)
    by_op = torch.empty_like(arguments["payload"])
    op(arguments["grad"], None, by_op, *compressor.config())
    assert torch.equal(by_op, arguments["payload"])

    out, by_op = torch.empty(NUMEL, device=device), torch.empty(NUMEL, device=device)
    compressor.decode(arguments["payload"][None], out)
    assert_equal(out.cpu(), decode(HOST, compressor, arguments["payload"].cpu(), torch.empty(NUMEL)))
    op = getattr(torch.ops.gckernels, f"{compressor.op_name}_decode")
    op(arguments["payload"][None], by_op, *compressor.config())
    assert_equal(by_op, out)


@for_each()
def test_payloads_may_lack_dimensions(compressor):
    """A single payload may be a vector, and a single chunk needs no dimension."""
    grad = torch.randn(NUMEL)
    payload = torch.empty(compressor.payload_nbytes(NUMEL), dtype=torch.uint8)
    compressor.encode(grad, None, payload)
    want, _ = encode(HOST, compressor, grad)
    assert torch.equal(payload, want[0])
    one, two = torch.empty(NUMEL), torch.empty(NUMEL)
    compressor.decode(payload, one)
    compressor.decode(torch.stack([payload, payload]), two, scale=0.5)
    assert_equal(one, decode(HOST, compressor, want, torch.empty(NUMEL)))
    assert_equal(two, one)


@DEVICES
@parametrize(among=DEFAULTS, quick=ONE_OF_EACH_KIND)
def test_opcheck(compressor, device):
    """torch's checks pass with fixed and with symbolic sizes: schema, declared mutation, fake implementation,
    autograd."""
    name, config = compressor.op_name, compressor.config()
    arguments = encode_arguments(compressor, device)
    encode_op = getattr(torch.ops.gckernels, f"{name}_encode").default
    decode_op = getattr(torch.ops.gckernels, f"{name}_decode").default
    torch.library.opcheck(encode_op, (*arguments.values(), *config, 3))
    torch.library.opcheck(encode_op, (arguments["grad"], None, arguments["payload"], *config))
    payloads, out = decode_arguments(compressor, device).values()
    torch.library.opcheck(decode_op, (payloads, out, *config, 0.5, True))
    recode_op = getattr(torch.ops.gckernels, f"{name}_recode").default
    payloads, residual, payload = recode_arguments(compressor, device).values()
    torch.library.opcheck(recode_op, (payloads, residual, payload, NUMEL, *config, 0.5, 3))
    torch.library.opcheck(recode_op, (payloads, None, payload, NUMEL, *config))
