"""Units of several sizes and types to encode, decode and recode, and comparisons of what was written."""

from __future__ import annotations

import dataclasses

import torch

from gckernels import chunk_numel
from gckernels.codec import Decoding, Encoding, Recoding
from helpers import HOST, POISON_BYTE, assert_equal, encode, random_residual

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 17, 1500, 4096)


def encodings(compressor, device, chunks, dtypes=DTYPES, sizes=SIZES, residuals=True) -> list[Encoding]:
    """Units of several sizes and types: every third has no residual, one begins at an address not divisible by 16, and
    one has a payload with room to spare."""
    units = []
    for index, numel in enumerate(sizes):
        dtype, shift = dtypes[index % len(dtypes)], int(index == 3)
        grad = torch.randn(numel + shift).to(dtype)[shift:] if shift else torch.randn(numel).to(dtype)
        size = chunk_numel(numel, chunks) + (16 if index == 2 else 0)
        residual = random_residual(compressor, numel).to(device) if residuals and index % 3 != 2 else None
        payload = torch.full((chunks, compressor.payload_nbytes(size)), POISON_BYTE, dtype=torch.uint8, device=device)
        moved = grad.to(device) if device != "cpu" else grad
        units.append(Encoding(compressor, moved, residual, payload, seed=(1 << 63) + 12345 * index, size=size))
    return units


def decodings(compressor, device, chunks, sources, sizes=SIZES) -> list[Decoding]:
    units = []
    for unit in encodings(compressor, "cpu", chunks, sizes=sizes):
        numel = unit.grad.numel()
        payloads = [
            encode(HOST, compressor, torch.randn(numel), None, chunks, size=unit.size)[0] for _ in range(sources)
        ]
        out = torch.randn(numel + 1).to(unit.grad.dtype).to(device)[numel % 2 : numel + numel % 2]
        units.append(Decoding(compressor, torch.stack(payloads).to(device), out, unit.size))
    return units


def recodings(compressor, device, sizes=SIZES) -> list[Recoding]:
    units = []
    for index, unit in enumerate(decodings(compressor, device, 1, 3, sizes)):
        numel, shard = unit.out.numel(), compressor.shard_compressor
        residual = random_residual(shard, numel).to(device) if index % 3 != 2 else None
        payload = torch.full_like(unit.payloads[0, 0], POISON_BYTE)
        units.append(Recoding(compressor, unit.payloads[:, 0], residual, payload, numel, 7 * index, unit.size))
    return units


def copied(units: list) -> list:
    """The same units with copies of the tensors that are written."""
    written = {"residual", "payload", "out"}
    copies = []
    for unit in units:
        values = {field.name: getattr(unit, field.name) for field in dataclasses.fields(unit)}
        changes = {name: value.clone() for name, value in values.items() if name in written and value is not None}
        copies.append(dataclasses.replace(unit, **changes))
    return copies


def assert_same(got: list, want: list) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        for name in ("residual", "payload", "out"):
            tensor = getattr(one, name, None)
            if tensor is not None:
                assert_equal(tensor, getattr(other, name), f"{name} of unit {index}")
