"""Readings of compression: norms of the gradients that one training step encodes, and of what the encodings leave out.

The error of an encoding is what it leaves out relative to what it was given. With error feedback these are the new
residual and the sum of gradient and old residual, ``|r'| / |g + r|``; a residual that grows without bound shows in
``|r'| / |g|``. Without feedback they are the difference between the gradient and its decoded payload, and the gradient.

A compressor with a velocity, or one that limits the gradient, adds something else than the gradient to its residual.
The gradient gives way to it here, and the error is read from the decoded payload. A majority vote has no error: it
says nothing of magnitudes, so it is never near to what was given.

Everything is computed where the gradients are, on the lane that encodes them, and the host reads nothing.

A rank's residual of a low-rank method also holds the difference between its gradient and the mean, which grows on each
rank and cancels out among all of them. So the means of the ranks' vectors count there. They are not sent: every rank
multiplies its vectors by the same random signs and adds them up to :data:`SKETCH` numbers. The mean of these *sketches*
is the sketch of the mean, and its norm is that of the mean vector to about 4 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .residual import Residual

SKETCH = 256
"""The numbers of a sketch."""


@dataclass(frozen=True)
class ProbedPiece:
    """A piece of gradient whose encoding keeps exactly what it leaves out as its residual."""

    key: str  # name of its unit
    source: torch.Tensor  # the piece that is encoded, [numel]
    residual: Residual

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The squared norms of the gradient and of all that is encoded, before it is encoded."""
        gradient, residual = self.source.float(), self.residual.values()
        square = torch.dot(gradient, gradient)
        return square, square + 2 * torch.dot(gradient, residual) + torch.dot(residual, residual)

    def left(self) -> torch.Tensor:
        """The squared norm of what the encoding has left out, after it."""
        residual = self.residual.values()
        return torch.dot(residual, residual)


class Decoded:
    """A piece of gradient whose payload is decoded to see what the encoding has left out.

    Args:
        key: name of its unit.
        source: the piece that is encoded, ``[numel]``.
        decode: writes what the payload stands for into ``fp32 [numel]``.
        residual: the states of its encoding, ``fp32 [states * numel]``; ``None`` without feedback.
        accumulate: returns the states with a gradient, as :meth:`gckernels.Codec.accumulate` does.
    """

    def __init__(
        self,
        key: str,
        source: torch.Tensor,
        decode: Callable[[torch.Tensor], None],
        residual: torch.Tensor | None = None,
        accumulate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add,
    ) -> None:
        self.key = key
        self._source, self._decode, self._residual, self._accumulate = source, decode, residual, accumulate
        self._values: torch.Tensor | None = None

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As of :class:`ProbedPiece`."""
        gradient, residual = self._source.float(), self._residual
        square = torch.dot(gradient, gradient)
        if residual is None:
            self._values = gradient
            return square, square
        numel = gradient.numel()
        self._values = values = self._accumulate(gradient, residual)[-numel:]
        added = values - residual[-numel:]
        # a velocity adds something to a unit without a gradient, which has no reading
        return torch.where(square == 0, square, torch.dot(added, added)), torch.dot(values, values)

    def left(self) -> torch.Tensor:
        """As of :class:`ProbedPiece`. The decoded piece exists only meanwhile."""
        values, self._values = self._values, None
        assert values is not None
        decoded = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        self._decode(decoded)
        decoded.sub_(values)
        return torch.dot(decoded, decoded)


Encoded: TypeAlias = ProbedPiece | Decoded
"""A piece of gradient that is encoded."""


class Readings:
    """The norms of one training step on one rank. Lanes add to it while the step runs."""

    def __init__(self) -> None:
        self._squares: dict[str, list[torch.Tensor]] = {}
        self._given: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sketches: dict[str, torch.Tensor] = {}

    def around(self, pieces: Sequence[Encoded], encode: Callable[[], object]) -> None:
        """Encode pieces, and take norms before and after.

        Args:
            encode: encodes them and changes their residuals.
        """
        before = [piece.given() for piece in pieces]
        encode()
        for piece, given in zip(pieces, before, strict=True):
            self._squares.setdefault(piece.key, []).append(torch.stack((*given, piece.left())))

    def before(self, key: str, gradient: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Take sketches of a unit of a low-rank method before a step.

        Args:
            key: the name of the unit.
            gradient: the gradient of this rank.
            residual: its residual; ``None`` without feedback.
        """
        own = sketch(gradient)
        self._given[key] = own, own if residual is None else own + sketch(residual)

    def after(self, key: str, gradient: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Take sketches of the same unit after the step.

        Args:
            key: the name of the unit.
            gradient: its decoded mean gradient.
            residual: the new residual of this rank; ``None`` without feedback.
        """
        own, given = self._given.pop(key)
        left = given - sketch(gradient) if residual is None else sketch(residual)
        self._sketches[key] = torch.stack((own, given, left))

    def norms(self, keys: Sequence[str], device: torch.device) -> torch.Tensor:
        """The norms of units on a device, ``fp32 [3, units]``: of the gradient, of gradient plus residual, and of what
        is left out. A unit without a reading has zeros.

        Args:
            keys: the names of the units.
            device: the device of the result.
        """
        nothing = torch.zeros(3, dtype=torch.float32, device=device)
        found = [torch.stack([each.to(device) for each in self._squares.get(key, [nothing])]).sum(0) for key in keys]
        return (torch.stack(found, dim=1) if found else nothing.new_zeros(3, 0)).clamp(min=0.0).sqrt()

    def sketches(self, keys: Sequence[str], device: torch.device) -> torch.Tensor:
        """The sketches of units of low-rank methods, ``fp32 [units, 3, SKETCH]``, of the same vectors as :meth:`norms`.
        A unit without a reading has zeros.

        Args:
            keys: the names of the units, at least one.
            device: the device of the result.
        """
        nothing = torch.zeros(3, SKETCH, dtype=torch.float32, device=device)
        return torch.stack([self._sketches.get(key, nothing).to(device) for key in keys])


class ProbeSchedule:
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


def sketch(vector: torch.Tensor) -> torch.Tensor:
    """The sketch of a vector, ``fp32 [SKETCH]``: sums of parts of its elements with random signs, which depend only on
    their number and on the kind of device."""
    numel, device = vector.numel(), vector.device
    rows = -(-numel // SKETCH)
    generator = torch.Generator(device).manual_seed(numel)
    words = torch.empty(rows * SKETCH // 8, dtype=torch.int64, device=device)
    signs = words.random_(-(2**63), None, generator=generator).view(torch.int8).sign_().bitwise_or_(1)[:numel]
    signed = torch.zeros(rows * SKETCH, dtype=torch.float32, device=device)
    torch.mul(vector, signs, out=signed[:numel])
    return signed.view(rows, SKETCH).sum(0)
