"""Tables for kernels: numbers from which the programs of a launch find their work."""

from __future__ import annotations

import torch


def to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table made on the CPU, copied without waiting: torch keeps pinned memory until the copy has been made."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
