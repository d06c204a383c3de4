"""Tables of integers for the kernels of PowerSGD: addresses and shapes of matrices, and the work of every program."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from ...toolkit.kernels.tables import to_device


@functools.lru_cache(maxsize=512)
def on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """The rows as an int64 tensor on ``device``, copied only once, without waiting."""
    return to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


def padded(factors: Sequence[torch.Tensor], smallest: int) -> int:
    """Columns of a tile that holds any of the factors, at least ``smallest``; matrix products need 16."""
    return max(smallest, triton.next_power_of_2(max(factor.shape[0] for factor in factors)))
