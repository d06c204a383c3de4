"""Where steps compute, and the memory that they compute on: the device that has the gradients, and the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..programs.steps import Place

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Places:
    """The memory of one rank.

    Attributes:
        device: that has the gradients.
        host: the processor's.
        apart: the two are not the same memory, so that what a step needs at the other place is copied there.
    """

    device: torch.device
    host: torch.device
    apart: bool

    @staticmethod
    def of(device: torch.device) -> Places:
        """Those of a rank whose gradients are on ``device``."""
        return Places(device, _HOST, apart=device.type != "cpu")

    def actual(self, place: Place) -> Place:
        """``place`` or, where the host has no memory of its own, the device."""
        return place if self.apart else Place.DEVICE

    def memory(self, place: Place) -> torch.device:
        """Where tensors of ``place`` are."""
        return self.host if self.actual(place) == Place.HOST else self.device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A new tensor at ``place``. On the host of a device its pages are locked, so that copies between the two need
        not wait for each other, nor the thread that asks for them."""
        memory = self.memory(place)
        pinned = memory.type == "cpu" and self.device.type == "cuda"
        return torch.zeros(*shape, dtype=dtype, device=memory, pin_memory=pinned)
