"""Specification of feedback, chunks and merging, which all algorithms share, in plain and slow torch.

``Codec.encode_reference`` and ``decode_reference`` specify one payload. The functions here specify how
``Codec.encode``, ``decode`` and ``recode`` use them. Tests and benchmarks compare against these functions.
"""

from __future__ import annotations

import torch

from ..codec import Backend, Codec, Decoding, Encoding, chunk_numel
from .residuals import decode_residual, encode_residual


def encode_reference(
    compressor: Codec,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    chunks: int = 1,
    seed: int = 0,
    scale: float = 1.0,
    size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(payload [chunks, nbytes], new residual [states * numel])`` on the device of ``grad``.

    No argument is changed. The new residual is ``None`` without a residual, and in 8 bits if the old one is.
    """
    size = chunk_numel(grad.numel(), chunks) if size is None else size
    if residual is not None and residual.dtype == torch.uint8:
        values = decode_residual(residual, grad.numel(), size)
        payload, left = encode_reference(compressor, grad, values, chunks, seed, scale, size)
        return payload, None if left is None else encode_residual(left, chunks, size)
    accumulated = grad.float() if residual is None else compressor.accumulate(grad.float(), residual)
    values = last_state(accumulated, grad.numel())
    payloads, decoded = [], []
    for chunk in range(chunks):  # the last chunks may be short or empty, but their payloads have full size
        part = values[chunk * size : (chunk + 1) * size] * scale
        payloads.append(compressor.encode_reference(part, size, seed, chunk * size))
        decoded.append(compressor.decode_reference(payloads[-1], size) / scale)
    left = None
    if residual is not None:
        left = new_residual(compressor, accumulated, torch.cat(decoded)[: grad.numel()], residual)
    return torch.stack(payloads), left


def last_state(states: torch.Tensor, numel: int) -> torch.Tensor:
    """The last vector of ``numel`` elements of the accumulated states, which is the one to encode."""
    return states[states.numel() - numel :]


def new_residual(
    compressor: Codec, accumulated: torch.Tensor, decoded: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """The new residual, ``[states * numel]``; elements that would not be finite keep their old states."""
    left = compressor.keep(accumulated, decoded)
    finite = torch.isfinite(left).view(-1, max(1, decoded.numel())).all(0)
    return torch.where(finite.repeat(compressor.traits.states)[: left.numel()], left, residual)


def decode_reference(
    compressor: Codec,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    accumulate: bool = False,
    size: int | None = None,
) -> torch.Tensor:
    """The values, in the dtype of ``out``, that ``decode`` writes for ``payloads [sources, chunks, nbytes]``."""
    sources, chunks, _ = payloads.shape
    size = chunk_numel(out.numel(), chunks) if size is None else size
    total = torch.zeros(chunks * size, dtype=torch.float32, device=payloads.device)
    for source in range(sources):
        parts = [compressor.decode_reference(payloads[source, chunk], size) for chunk in range(chunks)]
        total = total + torch.cat(parts)
    total = compressor.merge(total[: out.numel()], scale)
    return (total + out.float() if accumulate else total).to(out.dtype)


class Reference(Backend):
    """The specification as a back end: for machines without a C compiler, and to compare with."""

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        chunks = unit.payload.shape[0]
        arguments = unit.grad, unit.residual, chunks, unit.seed, scale, unit.size
        payload, left = encode_reference(unit.compressor, *arguments)
        unit.payload.copy_(payload)
        if unit.residual is not None and left is not None:
            unit.residual.copy_(left.view_as(unit.residual))

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        unit.out.copy_(decode_reference(unit.compressor, unit.payloads, unit.out, scale, accumulate, unit.size))


REFERENCE = Reference()
