"""The memories in which steps compute: the memory of the device with the gradients, and the host's.

The buffers of a message have memory of their own there, or lie in an :class:`BufferArena`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from gckernels.devices import is_accelerator

from ..programs.steps import Place

Allocate = Callable[[Sequence[int], torch.dtype, Place], torch.Tensor]
"""A function that returns a buffer with a shape and a dtype at a place, whose elements are written before they are
read."""
T = TypeVar("T")

_HOST = torch.device("cpu")
_ALIGN_NBYTES = 256  # as torch aligns tensors of their own on a device


@dataclass(frozen=True)
class Places:
    """The memories of one rank."""

    device: torch.device  # the device of the gradients
    host: torch.device  # the CPU
    apart: bool  # whether the two have different memories, so that data is copied from one to the other

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

        On the host of an accelerator it is pinned, so that copies between the two are asynchronous.
        """
        memory = self.memory(place)
        pinned = memory.type == "cpu" and is_accelerator(self.device)
        return torch.zeros(*shape, dtype=dtype, device=memory, pin_memory=pinned)


class BufferArena:
    """Memory for the buffers of the messages of one bucket, and then for those of others.

    The first bucket of a size that has no room makes the memory larger. It is then elsewhere, and earlier messages must
    be built anew before they are used again.

    Args:
        places: the memories of the rank.

    Attributes:
        version: the number of times that it has become larger.
    """

    def __init__(self, places: Places) -> None:
        self.version = 0
        self._places = places
        self._blocks = {
            place: places.zeros([0], torch.uint8, place) for place in {places.actual(each) for each in Place}
        }
        self._needed_nbytes = dict.fromkeys(self._blocks, 0)

    @property
    def nbytes(self) -> int:
        """Its bytes, on the device and on the host."""
        return sum(block.numel() for block in self._blocks.values())

    def build(self, make: Callable[[], T]) -> T:
        """The messages of a bucket, of which ``make`` takes all buffers from here. It is called twice if there is too
        little memory."""
        made = self._made(make)
        if short := [place for place, needed in self._needed_nbytes.items() if needed > self._blocks[place].numel()]:
            del made
            for place in short:
                self._blocks[place] = self._places.zeros([self._needed_nbytes[place]], torch.uint8, place)
            self.version += 1
            made = self._made(make)
        return made

    def _made(self, make: Callable[[], T]) -> T:
        self._needed_nbytes = dict.fromkeys(self._blocks, 0)
        return make()

    def take(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """The next buffer, which is not set to anything; memory of its own while there is too little."""
        place = self._places.actual(place)
        start, nbytes = self._needed_nbytes[place], math.prod(shape) * dtype.itemsize
        self._needed_nbytes[place] = start + -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        if start + nbytes > self._blocks[place].numel():
            return self._places.zeros(shape, dtype, place)
        return self._blocks[place][start : start + nbytes].view(dtype).view(*shape)
