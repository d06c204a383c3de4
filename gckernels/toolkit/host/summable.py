"""Arguments of the host programs of payloads that add up: the casts and RandomK."""

from __future__ import annotations

import ctypes
from typing import Any, Self

from ...codec import Decoding, Encoding
from .library import DTYPES
from .structs import pointer


class SummableCall(ctypes.Structure):
    """Arguments of the functions in ``toolkit/cast/host.c``, and the first ones of those in ``ops/randomk/host.c``.

    A payload is a vector of numbers of ``width`` bytes. Strides and ``payload_count`` are in numbers.
    """

    _fields_ = (
        ("source", pointer(const=True)),  # the gradient; when decoding, the payloads
        ("residual", pointer(ctypes.c_float)),  # or None
        ("target", pointer()),  # the payloads; when decoding, the output
        *(
            (name, ctypes.c_int64) for name in ("numel", "size", "tiles")
        ),  # elements of unit and chunk; tiles of a chunk
        *((name, ctypes.c_int64) for name in ("chunk_stride", "sources", "source_stride", "payload_count")),
        *(("scale", ctypes.c_float), ("dtype", ctypes.c_int32), ("accumulate", ctypes.c_int32)),
    )

    @classmethod
    def encoding(cls, unit: Encoding, width: int, tiles: int, scale: float, **more: Any) -> Self:
        """The call that encodes ``unit``, with ``tiles`` tiles per chunk."""
        return cls(
            source=unit.grad.data_ptr(),
            residual=None if unit.residual is None else unit.residual.data_ptr(),
            target=unit.payload.data_ptr(),
            numel=unit.grad.numel(),
            size=unit.size,
            tiles=tiles,
            chunk_stride=unit.payload.stride(0) // width,
            payload_count=unit.payload.shape[1] // width,
            scale=scale,
            dtype=DTYPES[unit.grad.dtype],
            **more,
        )

    @classmethod
    def decoding(cls, unit: Decoding, width: int, tiles: int, scale: float, accumulate: bool, **more: Any) -> Self:
        """The call that decodes ``unit``, with ``tiles`` tiles per chunk."""
        return cls(
            source=unit.payloads.data_ptr(),
            target=unit.out.data_ptr(),
            numel=unit.out.numel(),
            size=unit.size,
            tiles=tiles,
            chunk_stride=unit.payloads.stride(1) // width,
            sources=unit.payloads.shape[0],
            source_stride=unit.payloads.stride(0) // width,
            scale=scale,
            dtype=DTYPES[unit.out.dtype],
            accumulate=accumulate,
            **more,
        )
