"""The memories in which steps compute: that of the device with the gradients, and that of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..programs.steps import Place

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Places:
    """The memories of one rank.

    Attributes:
        device: the device of the gradients.
        host: the CPU.
        apart: whether the two have different memories, so that data is copied from one to the other.
    """

    device: torch.device
    host: torch.device
    apart: bool

    @staticmethod
    def of(device: torch.device) -> Places:
        """The memories of a rank whose gradients are on ``device``."""
        return Places(device, _HOST, apart=device.type != "cpu")

    def actual(self, place: Place) -> Place:
        """``place`` if host and device have different memories, otherwise always ``Place.DEVICE``."""
        return place if self.apart else Place.DEVICE

    def memory(self, place: Place) -> torch.device:
        """The torch device of tensors at ``place``."""
        return self.host if self.actual(place) == Place.HOST else self.device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A new tensor of zeros at ``place``.

        On the host of a CUDA device it is pinned, so that copies between the two are asynchronous.
        """
        memory = self.memory(place)
        pinned = memory.type == "cpu" and self.device.type == "cuda"
        return torch.zeros(*shape, dtype=dtype, device=memory, pin_memory=pinned)
