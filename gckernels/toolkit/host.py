"""The host path's one mechanism: walk a unit in tiles that stay in the cache, with scratch allocated once per call.

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
