"""NumPy for the host path of sparse payloads: a unit in tiles that stay in the cache, scratch allocated once per call.

Naive torch is slow on a CPU because each of its operations sends a temporary as large as the gradient through main
memory; the same operations on tiles of 96 KiB are several times faster. A tile has fewer elements than torch hands to
a second thread, so no operation waits for cores that are busy elsewhere. NumPy does the work on the tensors' own memory
(a call costs it half a microsecond, torch two), torch the conversions from and to 16 bits (it knows bf16).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

TILE_NUMEL = 24 * 1024


def spans(numel: int, step: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of consecutive pieces of at most ``step`` out of ``numel``."""
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def add_feedback(grad: torch.Tensor, residual: torch.Tensor | None, out: np.ndarray) -> None:
    """``grad + residual`` in fp32 into ``out`` (same shape)."""
    if grad.dtype == torch.float32:
        values = grad.numpy()
    else:  # NumPy has no bf16
        values = torch.from_numpy(out).copy_(grad).numpy()
    if residual is None:
        np.copyto(out, values)
    else:
        np.add(residual.numpy(), values, out=out)


def store_merged(total: np.ndarray, out: torch.Tensor, scale: float, accumulate: bool) -> None:
    """``out = [out +] scale * total``, computed in fp32; ``total`` is scratch and is overwritten."""
    last = out.numpy() if out.dtype == torch.float32 else total
    np.multiply(total, np.float32(scale), out=total if accumulate else last)
    if accumulate:
        np.add(total, out.float().numpy(), out=last)
    if last is total:
        out.copy_(torch.from_numpy(total))


def as_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes of any dtype as ``uint8``; without a copy where they are bool."""
    return codes.view(np.uint8) if codes.dtype == np.bool_ else codes.astype(np.uint8, copy=False)


def pack_host(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """``uint8 [numel]`` codes of 1, 2, 4 or 8 bits into ``packed``, ``uint8 [packed_nbytes]``, in place."""
    if bits == 8:
        packed[:] = codes
    elif bits == 1:
        packed[:] = np.packbits(codes, bitorder="little")
    else:
        per_byte = 8 // bits
        whole = codes.size // per_byte
        lanes = codes[: whole * per_byte].reshape(whole, per_byte)
        np.copyto(packed[:whole], lanes[:, 0])
        for lane in range(1, per_byte):
            packed[:whole] |= lanes[:, lane] << (lane * bits)
        if whole < packed.size:
            rest = codes[whole * per_byte :].astype(np.uint32)
            packed[whole] = int((rest << (np.arange(rest.size, dtype=np.uint32) * bits)).sum())


def unpack_host(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """The inverse of :func:`pack_host`: ``packed`` into ``codes``, ``uint8 [numel]``, in place."""
    if bits == 8:
        codes[:] = packed
    elif bits == 1:
        codes[:] = np.unpackbits(packed, count=codes.size, bitorder="little")
    else:
        per_byte = 8 // bits
        for lane in range(per_byte):
            every = codes[lane::per_byte]
            np.right_shift(packed[: every.size], lane * bits, out=every)
            every &= np.uint8(2**bits - 1)
