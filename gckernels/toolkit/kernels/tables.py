"""Tables for kernels: numbers from which the programs of a launch find their work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch


def to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table made on the CPU, copied without waiting: torch keeps pinned memory until the copy has been made."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


class Table:
    """The table of a launch's units.

    Args:
        programs: for each unit, the number of Triton programs per chunk, and the number of chunks.
        rows: for each unit, the further fields of its row.
        device: device of the launch.

    Attributes:
        args: int32, the unit of every program; and int64, for every unit its first program, its programs per chunk, and
            the further fields.
        grid: the grid of the launch.
    """

    def __init__(self, programs: Sequence[tuple[int, int]], rows: Sequence[Any], device: torch.device) -> None:
        totals = [per_chunk * chunks for per_chunk, chunks in programs]
        firsts = accumulate(totals, initial=0)
        full = [(first, per_chunk, *row) for first, (per_chunk, _), row in zip(firsts, programs, rows, strict=False)]
        units = torch.arange(len(rows), dtype=torch.int32, device="cpu")
        units = units.repeat_interleave(torch.tensor(totals, dtype=torch.int64, device="cpu"))
        self.args = to_device(units, device), to_device(torch.tensor(full, dtype=torch.int64, device="cpu"), device)
        self.grid = (sum(totals),)
