"""Compressors whose payloads are the values in a floating-point dtype, without a header.

Collectives can add such payloads, so they have no status word, and inf and NaN are values. Every NaN is stored as the
quiet NaN with the sign bit clear, so that equal values are equal bytes on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...batch import Batch
from ...compressor import Compressor
from ..payload import ALIGN_NBYTES, round_up
from . import batch_kernels, host, kernels

_QUIET_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


@dataclass(frozen=True)
class CastCompressor(Compressor):
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

    # ---------------------------------------------------------------- host path

    def compile_host(self, recodes: bool = False) -> None:
        host.build(self.traits.payload_dtype)

    def encode_host(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        host.encode(self, grad, residual, payload, size, scale)

    def decode_host(self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool) -> None:
        host.decode(self, payloads, out, size, scale, accumulate)

    def recode_host(
        self,
        payloads: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        numel: int,
        size: int,
        scale: float,
        seed: int,
    ) -> None:
        host.recode(self, payloads, residual, payload, numel, size, scale)

    # ---------------------------------------------------------------- kernels

    def encode_triton(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        kernels.encode(self, grad, residual, payload, size, scale)

    def decode_triton(
        self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
    ) -> None:
        kernels.decode(self, payloads, out, size, scale, accumulate)

    def recode_triton(
        self,
        payloads: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        numel: int,
        size: int,
        scale: float,
        seed: int,
    ) -> None:
        kernels.recode(self, payloads, residual, payload, numel, size, scale)

    # ---------------------------------------------------------------- many units

    def batch(self, place: str) -> Batch:
        batch = host.CastHostBatch if place == "host" else batch_kernels.CastKernelBatch
        return batch(self, place)
