"""A residual or factor of one unit: fp32, or in 8 bits (:mod:`gckernels.toolkit.residuals`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gckernels.codec import chunk_bounds
from gckernels.devices import used_here
from gckernels.toolkit.residuals import decode_residual, encode_residual, multiply_residual, residual_nbytes


@dataclass(frozen=True)
class EncodedForm:
    """The form of a residual in 8 bits: a row for every payload of its unit."""

    chunks: int  # the number of rows
    size: int  # the elements that every row is laid out for


class Residual:
    """Values that a unit keeps from step to step.

    Args:
        tensor: ``fp32 [numel]``, or with ``form`` ``uint8 [chunks, residual_nbytes(size)]``, or one row of these.
        numel: the number of values.
        form: the form in 8 bits; ``None`` for fp32.

    Attributes:
        tensor: what an encoding takes, and changes in place.
        numel, form: as given.
    """

    def __init__(self, tensor: torch.Tensor, numel: int, form: EncodedForm | None = None) -> None:
        self.tensor, self.numel, self.form = tensor, numel, form

    @classmethod
    def zeros(cls, numel: int, device: torch.device, form: EncodedForm | None) -> Residual:
        """A residual of zeros."""
        if form is None:
            return cls(torch.zeros(numel, dtype=torch.float32, device=device), numel)
        shape = form.chunks, residual_nbytes(form.size)
        return cls(torch.zeros(shape, dtype=torch.uint8, device=device), numel, form)

    def change(self, device: torch.device, form: EncodedForm | None) -> None:
        """Take another form, or go to another device. The tensor stays the same if nothing changes."""
        before = self.tensor
        if form != self.form:
            values = self.values()
            self.tensor = values if form is None else encode_residual(values, form.chunks, form.size)
            self.form = form
        self.tensor = self.tensor.to(device)
        if self.tensor is not before:
            used_here(before)  # a state may have been loaded on another stream

    def part(self, chunk: int, size: int, states: int = 1) -> Residual:
        """The residual of one payload of the unit, in the same memory.

        Args:
            chunk: the number of the payload.
            size: the elements of a payload.
            states: the states of the compressor. The states of one payload lie together.
        """
        start, stop = chunk_bounds(self.numel // states, size, chunk)
        numel = states * (stop - start)
        if self.form is None:
            return Residual(self.tensor[states * start : states * stop], numel)
        return Residual(self.tensor[chunk], numel, EncodedForm(1, size))

    # ---------------------------------------------------------------- values

    def values(self) -> torch.Tensor:
        """The values, ``fp32 [numel]``: for fp32 their own memory, else decoded."""
        return self.tensor if self.form is None else decode_residual(self.tensor, self.numel, self.form.size)

    def write(self, values: torch.Tensor) -> None:
        """Replace the values by others, which may be what :meth:`values` has returned."""
        if self.form is not None:
            self.tensor.copy_(encode_residual(values, self.form.chunks, self.form.size).view_as(self.tensor))
        elif values is not self.tensor:
            self.tensor.copy_(values)

    def zero(self) -> None:
        """Make all values zero."""
        self.tensor.zero_()  # bytes of zeros are values of zero

    def add(self, other: Residual) -> None:
        """Add the values of a residual of the same form."""
        if self.form is None:
            self.tensor.add_(other.tensor)
        else:
            self.write(self.values().add_(other.values()))

    def with_tensor(self, tensor: torch.Tensor) -> Residual:
        """The residual of the same form with other memory."""
        return Residual(tensor, self.numel, self.form)


def multiply(residuals: Sequence[Residual], factor: torch.Tensor | float) -> None:
    """Multiply the values of residuals by a number from 0 up, an fp32 scalar on their device or a float. Powers of two
    change no bits of values in 8 bits."""
    if exact := [each.tensor for each in residuals if each.form is None]:
        torch._foreach_mul_(exact, factor)
    for each in residuals:
        if each.form is not None:
            multiply_residual(each.tensor, each.form.size, factor)
