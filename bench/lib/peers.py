"""Quantisers of other packages, stated again in plain torch, to be compiled and measured beside the package's own.

They have neither error feedback nor a status word, and compute on the current stream. ``torch.compile`` fuses each into
as few kernels as it can; the packages' own kernels read a row twice, or have the same passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Encoded = tuple[torch.Tensor, torch.Tensor]  # codes [rows, length], scales [rows, 1]


@dataclass(frozen=True)
class Peer:
    """A quantiser of another package.

    Attributes:
        spec: the compressor of this package that does the most similar thing.
        length: elements per scale.
        encode: the codes, a byte per element, and the fp32 scales of a gradient ``[rows, length]``.
        decode: the fp32 values ``[rows, length]`` of codes and scales.
    """

    spec: str
    length: int
    encode: Callable[[torch.Tensor], Encoded]
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def encoded_nbytes(self, numel: int) -> int:
        """The size of codes and scales."""
        return numel + 4 * -(-numel // self.length)


def _torchft_encode(rows: torch.Tensor) -> Encoded:
    scales = 448.0 / rows.abs().amax(1, keepdim=True).float()
    scales = torch.where(scales == torch.inf, 1.0, scales)
    return (rows * scales).to(torch.float8_e4m3fn), scales


def _torchft_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() / scales


def _torchao_encode(rows: torch.Tensor) -> Encoded:
    scales = (rows.abs().amax(1, keepdim=True).float() / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (rows * (1.0 / scales)).round().clamp(-128, 127).to(torch.int8), scales


def _torchao_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales


PEERS = {
    "torchft's fp8": Peer("BlockFP8", 2048, _torchft_encode, _torchft_decode),
    "torchao's int8": Peer("BlockQuant", 128, _torchao_encode, _torchao_decode),
}
"""By name: torchft's rows in fp8 with the reciprocal of a scale (``quantization.py``), here of 2048 elements; and
torchao's symmetric int8 with a scale per group (``quant_primitives.py``)."""
