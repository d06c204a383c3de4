"""The host path of :mod:`~gckernels.ops.randomk`: ``host.c``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import SEED_MASK, Backend, Decoding, Encoding, Work, number_in
from ...toolkit.host.calls import BATCHES, HostCalls
from ...toolkit.host.library import COMMON, VECTORS, declare, library
from ...toolkit.host.sources import program_text
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.summable import SummableCall
from ...toolkit.reference import REFERENCE
from ...toolkit.sparsifier.keys import require_size
from .header import HEADER_NUMEL, MAX_WORLD, PART_BITS

_TEMPLATE = "host.c"
_WIDTH = 4  # bytes of a number
_TILE = 2048


class _Call(SummableCall):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("nonfinite", pointer(ctypes.c_int32)),  # [chunks], whether an element is inf or NaN
        ("old", pointer(ctypes.c_float)),  # [chunks, k]: the entries' residuals
        ("k", ctypes.c_int64),  # entries of a payload
        *((name, ctypes.c_uint64) for name in ("seed", "seed_mask")),  # the bits of the seed that are used
    )


class RandomKHost(Backend):
    """The algorithm on the CPU, many units in one call."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build()

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        _encoder((unit,), scale, 2**64 - 1)()

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        _decoder((unit,), scale, accumulate)()

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return _encoder(units, scale, SEED_MASK, added)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        return _decoder(units, scale, accumulate)


class _Encoder:
    """Encodes all of its units when it is called."""

    def __init__(
        self, built: Any, units: Sequence[Encoding], scale: float, seed_mask: int, added: torch.Tensor | None
    ) -> None:
        self._added = added
        chunks = [unit.payload.shape[0] for unit in units]
        counts = [unit.compressor.capacity(unit.size) for unit in units]
        held = [
            count * number * (unit.residual is not None)
            for unit, count, number in zip(units, counts, chunks, strict=True)
        ]
        self._built, self._nonfinite = built, (ctypes.c_int32 * sum(chunks))()
        self._old = torch.empty(sum(held), dtype=torch.float32, device="cpu")
        nonfinite, old, calls = ctypes.addressof(self._nonfinite), self._old.data_ptr(), []
        for unit, k, number, numbers in zip(units, counts, chunks, held, strict=True):
            more = {"nonfinite": nonfinite, "old": old, "k": k, "seed": unit.seed, "seed_mask": seed_mask}
            # a unit without elements has a header
            calls.append(_Call.encoding(unit, _WIDTH, max(1, -(-unit.size // _TILE)), scale, **more))
            nonfinite += 4 * number
            old += 4 * numbers
        self._calls = HostCalls(calls, [call.tiles * number for call, number in zip(calls, chunks, strict=True)])

    def __call__(self) -> None:
        added = number_in(self._added)
        ctypes.memset(self._nonfinite, 0, ctypes.sizeof(self._nonfinite))
        self._calls.run(self._built.encode_batch, added)
        if any(self._nonfinite):
            self._calls.run(self._built.take_back_batch, added)


def _encoder(units: Sequence[Encoding], scale: float, seed_mask: int, added: torch.Tensor | None = None) -> Work:
    for unit in units:
        require_size(unit.compressor.name, unit.size)
    built = build()
    if built is None:
        return REFERENCE.bind_encodes(units, scale, added)
    return _Encoder(built, units, scale, seed_mask, added)


def _decoder(units: Sequence[Decoding], scale: float, accumulate: bool) -> Work:
    built = build()
    if built is None:
        return REFERENCE.bind_decodes(units, scale, accumulate)
    calls, tiles = [], []
    for unit in units:
        count, k = -(-unit.size // _TILE), unit.compressor.capacity(unit.size)
        calls.append(_Call.decoding(unit, _WIDTH, count, scale, accumulate, k=k))
        tiles.append(count * unit.payloads.shape[1])
    return functools.partial(HostCalls(calls, tiles).run, built.decode_batch)


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, "encode_batch", "take_back_batch", "decode_batch")
    return built


def program() -> str:
    """The source of the C program."""
    defines = {
        "TILE": _TILE,
        "HEADER_NUMEL": HEADER_NUMEL,
        "PART_BITS": PART_BITS,
        "MAX_WORLD": MAX_WORLD,
    }
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return "\n".join((text, COMMON, VECTORS, c_structs(call_t=_Call), BATCHES, program_text(__package__, _TEMPLATE)))
