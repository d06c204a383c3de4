"""The host path of the casts: ``host.c``, compiled for one dtype of payloads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import Decoding, Encoding, Recoding, Work
from ..host.backend import HostBackend
from ..host.calls import HostCall, HostCalls, Seeding, batches
from ..host.library import COMMON, DTYPES, TILE, declare, defined, library
from ..host.sources import program_text

_TEMPLATE = "host.c"


class CastHost(HostBackend):
    """Casts on the CPU."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        _build_for(compressor)

    def encoder(self, units: Sequence[Encoding], scale: float, seeds: Seeding) -> Work | None:
        built = _build_for(units[0].compressor)
        calls = HostCalls([HostCall.encoding(unit, scale, tiles=_tiles(unit)) for unit in units])
        return built and calls.work(built.encode_batch)

    def decoder(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work | None:
        built = _build_for(units[0].compressor)
        calls = HostCalls([HostCall.decoding(unit, scale, accumulate, tiles=_tiles(unit)) for unit in units])
        return built and calls.work(built.decode_batch)

    def recoder(self, units: Sequence[Recoding], scale: float, seeds: Seeding) -> Work | None:
        built = _build_for(units[0].compressor)
        calls = HostCalls([HostCall.recoding(unit, scale, tiles=_tiles(unit)) for unit in units])
        return built and calls.work(built.recode_batch)


def _tiles(unit: Encoding | Decoding | Recoding) -> int:
    return max(1, -(-unit.size // TILE))


def _build_for(compressor: Any) -> Any:
    return build(compressor.traits.payload_dtype)


@functools.cache
def build(payload_dtype: torch.dtype) -> Any:
    """The library with the compiled functions; ``None`` if they cannot be compiled."""
    return declare(library(program(payload_dtype)), "encode_batch", "decode_batch", "recode_batch")


def program(payload_dtype: torch.dtype) -> str:
    """The C source for one dtype of payloads."""
    defines = defined(DTYPE=DTYPES[payload_dtype], TILE=TILE)
    return "\n".join((defines, COMMON, batches(HostCall), program_text(__package__, _TEMPLATE)))
