"""Readings of error feedback: norms of the gradients that one training step encodes, and of what stays unsent.

The error of an encoding is what it leaves in the residual, ``|r'|``, relative to what it was given, ``|g + r|``. A
residual that grows without bound shows in ``|r'| / |g|``. Everything is computed where the gradients are, on the lane
that encodes them, and the host reads nothing.

The units of low-rank methods have no readings. A rank's residual of these also holds the difference between its
gradient and the mean, which grows on each rank and cancels out among all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A piece of gradient whose encoding keeps a residual with one state.

    Attributes:
        key: name of its unit.
        source: the piece that is encoded, ``[numel]``.
        residual: its residual, ``fp32 [numel]``.
    """

    key: str
    source: torch.Tensor
    residual: torch.Tensor


class Readings:
    """The norms of one training step on one rank. Lanes add to it while the step runs."""

    def __init__(self) -> None:
        self._squares: dict[str, list[torch.Tensor]] = {}

    def around(self, pieces: Sequence[Piece], encode: Callable[[], object]) -> None:
        """Encode pieces, and take norms before and after.

        Args:
            pieces: the pieces.
            encode: encodes them and changes their residuals.
        """
        before = [_given(piece) for piece in pieces]
        encode()
        for piece, given in zip(pieces, before, strict=True):
            left = torch.dot(piece.residual, piece.residual)
            self._squares.setdefault(piece.key, []).append(torch.stack((*given, left)))

    def norms(self, keys: Sequence[str], device: torch.device) -> torch.Tensor:
        """The norms of units on a device, ``fp32 [3, units]``: of the gradient, of gradient plus residual, and of the
        new residual. A unit without a reading has zeros.

        Args:
            keys: the names of the units.
            device: the device of the result.
        """
        nothing = torch.zeros(3, device=device)
        found = [torch.stack([each.to(device) for each in self._squares.get(key, [nothing])]).sum(0) for key in keys]
        return (torch.stack(found, dim=1) if found else torch.zeros(3, 0, device=device)).clamp(min=0.0).sqrt()


class Watch:
    """The choice of the steps of which readings are taken.

    Attributes:
        now: the readings of the step that runs; ``None`` in most steps.
        last: the readings of the last step that was watched, complete when that step has ended; ``None`` before.
    """

    def __init__(self) -> None:
        self.now: Readings | None = None
        self.last: Readings | None = None
        self._is_asked = False

    def ask(self) -> None:
        """Watch the next step that compresses."""
        self._is_asked = True

    def take(self) -> Readings | None:
        """The readings of the last step that was watched, once."""
        taken, self.last = self.last, None
        return taken

    def begin_step(self, compresses: bool) -> None:
        """Begin a training step, before anything of it is submitted."""
        self.now = None
        if self._is_asked and compresses:
            self._is_asked, self.now = False, Readings()
            self.last = self.now


def _given(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared norms of a gradient, and of it plus its residual, without a copy of either."""
    gradient, residual = piece.source.float(), piece.residual
    square = torch.dot(gradient, gradient)
    return square, square + 2 * torch.dot(gradient, residual) + torch.dot(residual, residual)
