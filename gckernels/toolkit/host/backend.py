"""The back end on the CPU: compiled programs, or the reference where they cannot be compiled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from ...codec import Backend, Decoding, Encoding, Recoding, Work
from ..reference import REFERENCE
from .calls import Seeding

_ALL_BITS = Seeding(2**64 - 1)


class HostBackend(Backend):
    """A back end whose units, one or many, are one call of a compiled program.

    Subclasses return the work of units, or ``None`` if their program cannot be compiled.
    """

    @abstractmethod
    def encoder(self, units: Sequence[Encoding], scale: float, seeds: Seeding) -> Work | None:
        """A function that encodes the units."""

    @abstractmethod
    def decoder(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work | None:
        """A function that decodes the units."""

    def recoder(self, units: Sequence[Recoding], scale: float, seeds: Seeding) -> Work | None:
        """A function that recodes the units; by default none, so that they are decoded and encoded."""
        return None

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        work = self.encoder((unit,), scale, _ALL_BITS)
        if work is None:
            REFERENCE.encode(unit, scale)
        else:
            work()

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        (self.decoder((unit,), scale, accumulate) or REFERENCE.bind_decodes((unit,), scale, accumulate))()

    def recode(self, unit: Recoding, scale: float = 1.0) -> None:
        work = self.recoder((unit,), scale, _ALL_BITS)
        if work is None:
            super().recode(unit, scale)
        else:
            work()

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return self.encoder(units, scale, Seeding(added=added)) or REFERENCE.bind_encodes(units, scale, added)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        return self.decoder(units, scale, accumulate) or REFERENCE.bind_decodes(units, scale, accumulate)

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return self.recoder(units, scale, Seeding(added=added)) or super().bind_recodes(units, scale, added)
