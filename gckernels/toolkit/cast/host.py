"""The host path of the casts: ``host.c``, compiled for one dtype of payloads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...batch import Batch, Seeded, Unseeded
from ...compressor import Decoding, Encoding, Recoding
from .. import reference
from ..host.calls import BATCHES, HostCalls
from ..host.library import COMMON, DTYPES, PART, TILE, declare, library
from ..host.structs import c_structs
from ..host.summable import SummableCall
from ..host.threads import run_parts

if TYPE_CHECKING:
    from . import CastCompressor

_TEMPLATE = Path(__file__).with_suffix(".c")


def encode(compressor: CastCompressor, grad, residual, payload, size: int, scale: float) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``."""
    built = build(compressor.traits.payload_dtype)
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], 0, scale, size)
        reference.write_encoded(encoded, payload, residual)
        return
    call = _encoding(compressor, grad, residual, payload, size, scale)
    run_parts(functools.partial(built.encode, ctypes.byref(call)), call.tiles * payload.shape[0], PART)


def recode(compressor: CastCompressor, payloads, residual, payload, numel: int, size: int, scale: float) -> None:
    """Merge ``payloads [sources, nbytes]`` and encode the result into ``payload [nbytes]``."""
    built = build(compressor.traits.payload_dtype)
    if built is None:
        encoded = reference.recode_reference(compressor, payloads, residual, numel, scale, 0, size)
        reference.write_encoded(encoded, payload, residual)
        return
    call = _recoding(compressor, payloads, residual, payload, numel, size, scale)
    run_parts(functools.partial(built.recode, ctypes.byref(call)), call.tiles, PART)


def decode(compressor: CastCompressor, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = build(compressor.traits.payload_dtype)
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    call = _decoding(compressor, payloads, out, size, scale, accumulate)
    run_parts(functools.partial(built.decode, ctypes.byref(call)), call.tiles * payloads.shape[1], PART)


def _encoding(compressor: CastCompressor, grad, residual, payload, size: int, scale: float) -> SummableCall:
    width, tiles = compressor.traits.payload_dtype.itemsize, max(1, -(-size // TILE))
    return SummableCall.encoding(grad, residual, payload, width, size, tiles, scale)


def _recoding(
    compressor: CastCompressor, payloads, residual, payload, numel: int, size: int, scale: float
) -> SummableCall:
    width = compressor.traits.payload_dtype.itemsize
    return SummableCall(
        source=payloads.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        target=payload.data_ptr(),
        numel=numel,
        size=size,
        tiles=max(1, -(-size // TILE)),
        sources=payloads.shape[0],
        source_stride=payloads.stride(0) // width,
        payload_count=payload.shape[0] // width,
        scale=scale,
    )


def _decoding(compressor: CastCompressor, payloads, out, size: int, scale: float, accumulate: bool) -> SummableCall:
    width, tiles = compressor.traits.payload_dtype.itemsize, -(-size // TILE)
    return SummableCall.decoding(payloads, width, out, size, tiles, scale, accumulate)


class CastHostBatch(Batch):
    """Batches of a ``CastCompressor``: all units in one call."""

    def bind_encodes(self, units: Sequence[Encoding], scale: float) -> Seeded:
        built = build(self.compressor.traits.payload_dtype)
        if built is None:
            return super().bind_encodes(units, scale)
        calls = [_encoding(self.compressor, u.grad, u.residual, u.payload, u.size, scale) for u in units]
        bound = _of_all(calls, [unit.payload.shape[0] for unit in units])
        return functools.partial(bound.run, built.encode_batch)

    def bind_decodes(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Unseeded:
        built = build(self.compressor.traits.payload_dtype)
        if built is None:
            return super().bind_decodes(units, scale, accumulate)
        calls = [_decoding(self.compressor, u.payloads, u.out, u.size, scale, accumulate) for u in units]
        bound = _of_all(calls, [unit.payloads.shape[1] for unit in units])
        return functools.partial(bound.run, built.decode_batch)

    def bind_recodes(self, units: Sequence[Recoding], scale: float) -> Seeded:
        built = build(self.compressor.traits.payload_dtype)
        if built is None:
            return super().bind_recodes(units, scale)
        calls = [_recoding(self.compressor, u.payloads, u.residual, u.payload, u.numel, u.size, scale) for u in units]
        return functools.partial(_of_all(calls, [1] * len(units)).run, built.recode_batch)


def _of_all(calls: Sequence[SummableCall], chunks: Sequence[int]) -> HostCalls:
    return HostCalls(calls, [call.tiles * number for call, number in zip(calls, chunks, strict=True)])


@functools.cache
def build(payload_dtype: torch.dtype) -> Any:
    """The library with the compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program(payload_dtype))
    if built is not None:
        names = ("encode", "decode", "recode")
        declare(built, *names, *(f"{name}_batch" for name in names))
    return built


def program(payload_dtype: torch.dtype) -> str:
    """The C source for one dtype of payloads."""
    defines = f"#define DTYPE {DTYPES[payload_dtype]}\n#define TILE {TILE}\n"
    return "\n".join((defines, COMMON, c_structs(call_t=SummableCall), BATCHES, _TEMPLATE.read_text()))
