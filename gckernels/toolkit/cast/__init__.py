"""Compressors whose payloads are the values in a floating-point dtype, without a header.

Collectives can add such payloads, so they have no status word, and inf and NaN are values. Every NaN is stored as the
quiet NaN with the sign bit clear, so that equal values are equal bytes on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codec import Backend, Codec, on_first_use
from ..payload import ALIGN_NBYTES, round_up

_QUIET_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


def _host() -> Backend:
    from .host import CastHost

    return CastHost()


def _triton() -> Backend:
    from .kernels import CastTriton

    return CastTriton()


@dataclass(frozen=True)
class CastCompressor(Codec):
    """Base of the casts. ``seed`` is not used.

    The ``traits`` of a subclass are ``summable``, with fp32, bf16 or fp16 as ``payload_dtype``.
    """

    def payload_nbytes(self, numel: int) -> int:
        return round_up(max(numel, 1) * self.traits.payload_dtype.itemsize, ALIGN_NBYTES)

    # ---------------------------------------------------------------- reference

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        bits_dtype, nan = _QUIET_NAN[self.traits.payload_dtype]
        payload = torch.zeros(self.payload_nbytes(numel), dtype=torch.uint8, device=values.device)
        bits = values.to(self.traits.payload_dtype).view(bits_dtype)
        payload.view(bits_dtype)[: values.numel()] = torch.where(values.isnan(), nan, bits)
        return payload

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return payload.view(self.traits.payload_dtype)[:numel].float()

    # ---------------------------------------------------------------- host path and kernels

    host = on_first_use(_host)
    triton = on_first_use(_triton)
