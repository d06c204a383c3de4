"""Arguments of the host programs of payloads that add up: the casts and RandomK."""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch

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
    def encoding(
        cls,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        width: int,
        size: int,
        tiles: int,
        scale: float,
        **more: Any,
    ) -> Self:
        """The call that encodes ``grad`` into ``payload [chunks, nbytes]``, with ``tiles`` tiles per chunk."""
        return cls(
            source=grad.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            target=payload.data_ptr(),
            numel=grad.numel(),
            size=size,
            tiles=tiles,
            chunk_stride=payload.stride(0) // width,
            payload_count=payload.shape[1] // width,
            scale=scale,
            dtype=DTYPES[grad.dtype],
            **more,
        )

    @classmethod
    def decoding(
        cls,
        payloads: torch.Tensor,
        width: int,
        out: torch.Tensor,
        size: int,
        tiles: int,
        scale: float,
        accumulate: bool,
        **more: Any,
    ) -> Self:
        """The call that decodes ``payloads [sources, chunks, nbytes]`` into ``out``, with ``tiles`` tiles per chunk."""
        return cls(
            source=payloads.data_ptr(),
            target=out.data_ptr(),
            numel=out.numel(),
            size=size,
            tiles=tiles,
            chunk_stride=payloads.stride(1) // width,
            sources=payloads.shape[0],
            source_stride=payloads.stride(0) // width,
            scale=scale,
            dtype=DTYPES[out.dtype],
            accumulate=accumulate,
            **more,
        )
