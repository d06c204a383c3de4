"""The arguments of the sparsifiers' C functions, as structures: one for encoding, one for decoding, made of parts."""

from __future__ import annotations

import ctypes
import functools

import torch

from ...codec import Decoding, Encoding
from ..host.library import DTYPES
from ..host.structs import c_structs, pointer
from .entries import SPAN

_OFFSETS = ("highs_offset", "lows_offset", "scales_offset", "values_offset")


class ChunkPayloads(ctypes.Structure):
    """The payloads of a unit's chunks and the places of their fields."""

    _fields_ = (
        ("payload", pointer(ctypes.c_uint8)),  # the first chunk's; when decoding, of the first source
        *((name, ctypes.c_int64) for name in ("chunks", "payload_stride", "nbytes")),
        *(
            (name, ctypes.c_int64) for name in ("numel", "size", "tiles")
        ),  # elements of unit and chunk; tiles of a chunk
        ("k", ctypes.c_int64),  # entries that there is room for
        *((name, ctypes.c_int64) for name in ("highs_words", *_OFFSETS)),
        *((name, ctypes.c_int32) for name in ("low", "value_bits")),
    )

    @classmethod
    def of(cls, compressor, size: int, numel: int, payload: torch.Tensor) -> ChunkPayloads:
        """The part for ``payload [..., chunks, nbytes]`` of a unit of ``numel`` elements in chunks of ``size``."""
        chunks, nbytes = payload.shape[-2:]
        places = _places(compressor, size)
        return cls(payload.data_ptr(), chunks, payload.stride(-2), nbytes, numel, size, **places)


@functools.lru_cache(maxsize=65536)  # every call needs them
def _places(compressor, size: int) -> dict[str, int]:
    """Facts about payloads of ``size`` elements."""
    layout = compressor.layout(size)
    return {
        "tiles": max(1, -(-size // SPAN)),
        "k": compressor.capacity(size),
        "highs_words": layout["highs"].count,
        **{f"{field.name}_offset": field.offset for field in layout.fields},
        "low": compressor.entries.low,
        "value_bits": compressor.value_bits,
    }


class GradientSource(ctypes.Structure):
    """The gradient, and the states that are accumulated with it (``states.py``)."""

    _fields_ = (
        ("grad", pointer(const=True)),
        ("residual", pointer(ctypes.c_float)),  # the elements that were not sent, or None
        ("velocity", pointer(ctypes.c_float)),  # the momentum's, or None
        ("squares", pointer(ctypes.c_double)),  # [chunks * tiles], or None
        ("max_norm", ctypes.c_double),  # a limit for the gradient, or 0
        *((name, ctypes.c_float) for name in ("momentum", "factor")),  # the latter of the gradient
        *((name, ctypes.c_int32) for name in ("dtype", "nesterov")),
    )

    @classmethod
    def of(cls, compressor, grad: torch.Tensor, residual: torch.Tensor | None) -> GradientSource:
        """The part for ``grad [numel]`` and ``residual [states * numel]``."""
        accumulation = compressor.accumulation
        kept = velocity = None
        if residual is not None:
            kept = residual.data_ptr() + (residual.numel() - grad.numel()) * residual.itemsize
            velocity = residual.data_ptr() if accumulation.momentum else None
        return cls(
            grad=grad.data_ptr(),
            residual=kept,
            velocity=velocity,
            max_norm=0.0 if residual is None else accumulation.max_norm or 0.0,
            momentum=accumulation.momentum,
            dtype=DTYPES[grad.dtype],
            nesterov=accumulation.nesterov,
        )


class TileEntries(ctypes.Structure):
    """The counts of a tile. Numbers of entries become numbers of entries before the tile."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first", "candidates")),  # first of them, -1 if there is no room
        *((name, ctypes.c_int64) for name in ("above", "between")),  # the bounds, and between them
    )


class ChunkState(ctypes.Structure):
    """The candidates of a chunk: their number, and whether all elements are searched instead of them."""

    _fields_ = (("candidates", ctypes.c_int64), ("missing", ctypes.c_int64))


class Selecting(ctypes.Structure):
    """How entries are selected (``rules.py``), and buffers for that, which ``lay_out`` fills in."""

    _fields_ = (
        ("bounds", pointer(ctypes.c_int64)),  # [chunks, 4]: lower, upper, room between them, entries
        ("entries", pointer(TileEntries)),  # [chunks * tiles]
        ("states", pointer(ChunkState)),  # [chunks]
        ("samples", pointer(ctypes.c_float)),  # [chunks, sample_blocks * SAMPLED]
        ("indices", pointer(ctypes.c_int32)),  # [chunks, room], for candidates
        *((name, pointer(ctypes.c_float)) for name in ("values", "velocities")),  # the same
        ("all", pointer(ctypes.c_float)),  # [size]: all values of one chunk
        *((name, ctypes.c_int64) for name in ("sample_blocks", "room", "searched")),  # the latter is that chunk
        *((name, ctypes.c_uint64) for name in ("seed", "added", "seed_mask")),  # the sum is masked
        *((name, ctypes.c_int32) for name in ("key", "by_sample", "narrowing")),
    )


class Writing(ctypes.Structure):
    """Entries side by side, before they are written."""

    _fields_ = (
        ("indices", pointer(ctypes.c_int32)),  # [chunks, k]
        ("values", pointer(ctypes.c_float)),  # [chunks, k]
        ("velocities", pointer(ctypes.c_float)),  # [chunks, k], where write_entries needs them; or None
    )


class EncodeCall(ctypes.Structure):
    """The arguments of the functions that encode."""

    _fields_ = (("payloads", ChunkPayloads), ("source", GradientSource), ("select", Selecting), ("write", Writing))

    @classmethod
    def of(cls, unit: Encoding, seed_mask: int) -> EncodeCall:
        """The call that encodes ``unit``, without buffers; ``seed_mask`` has the bits of seeds that are used."""
        compressor, rule = unit.compressor, unit.compressor.selection.rule
        return cls(
            payloads=ChunkPayloads.of(compressor, unit.size, unit.grad.numel(), unit.payload),
            source=GradientSource.of(compressor, unit.grad, unit.residual),
            select=Selecting(
                seed=unit.seed, seed_mask=seed_mask, key=rule.key, by_sample=rule.by_sample, narrowing=rule.narrowing
            ),
        )

    @property
    def tiles(self) -> int:
        """Tiles of all chunks."""
        return self.payloads.chunks * self.payloads.tiles


class DecodeCall(ctypes.Structure):
    """The arguments of the functions that decode."""

    _fields_ = (
        ("payloads", ChunkPayloads),
        *((name, ctypes.c_int64) for name in ("sources", "source_stride")),
        ("starts", pointer(ctypes.c_int64)),  # [sources, chunks, tiles + 1]: bits of the string before the tile
        ("out", pointer()),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "accumulate")),
    )

    @classmethod
    def of(cls, unit: Decoding, scale: float, accumulate: bool) -> DecodeCall:
        """The call that decodes ``unit``, without its buffer."""
        payloads, out = unit.payloads, unit.out
        return cls(
            payloads=ChunkPayloads.of(unit.compressor, unit.size, out.numel(), payloads),
            sources=payloads.shape[0],
            source_stride=payloads.stride(0),
            out=out.data_ptr(),
            scale=scale,
            dtype=DTYPES[out.dtype],
            accumulate=accumulate,
        )

    @property
    def tiles(self) -> int:
        """Tiles of all chunks."""
        return self.payloads.chunks * self.payloads.tiles

    @property
    def starts_count(self) -> int:
        """Length of ``starts``."""
        return self.sources * self.payloads.chunks * (self.payloads.tiles + 1)


STRUCTS = c_structs(
    payloads_t=ChunkPayloads,
    source_t=GradientSource,
    tile_entries_t=TileEntries,
    chunk_state_t=ChunkState,
    select_t=Selecting,
    write_t=Writing,
    encode_t=EncodeCall,
    decode_t=DecodeCall,
)
