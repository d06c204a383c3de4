"""Units that a rank has not used in a training step, and their residuals.

The result for a unit that no rank has used is thrown away, and with it what was sent of the residuals. But a rank knows
only what it has used itself; the answer for all ranks comes behind the step. So residuals of a unit that this rank has
not used are copied before the step changes them, and are restored if no rank has used the unit. All other residuals
cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gckernels.devices import is_accelerator

IsUsed = Callable[[str], torch.Tensor | bool]
"""Tells whether any rank has used the unit of a key: a bool, or a number on a device that is above 0."""


class Unused:
    """The units that this rank has not used in the current step, and copies of their residuals from before it."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._sent: set[str] = set()
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # the threads of lanes append
        self._is_used: IsUsed | None = None

    def begin(self) -> None:
        """Begin a step in which all units are used."""
        self.settle()
        self._keys, self._sent, self._copies = set(), set(), []

    def add(self, keys: Iterable[str], sends: bool = False) -> None:
        """Let units be unused in this step.

        Args:
            keys: the keys of the units.
            sends: whether their residuals are sent all the same, for the ranks that use the units.
        """
        keys = set(keys)
        self._keys |= keys
        self._sent |= keys if sends else set()

    def keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Back up tensors of unused units, and return the backups of units that must not be sent, by key.

        Args:
            tensors: residuals, parts of them, or others that are restored with them; with the keys of their units.
        """
        if not self._keys:
            return {}
        kept = [(key, tensor, tensor.clone()) for key, tensor in tensors if key in self._keys]
        self._copies += kept
        return {key: copy for key, _, copy in kept if key not in self._sent}

    def restore(self, is_used: IsUsed) -> None:
        """Restore the residuals of the units that no rank has used in the step. The host waits for a device only if
        that must tell it of a residual on the host."""
        copies, self._copies, self._is_used = self._copies, [], None
        for key, residual, copy in copies:
            used = is_used(key)
            if isinstance(used, torch.Tensor) and used.device == residual.device and is_accelerator(used.device):
                torch.where(used > 0, residual, copy, out=residual)
            elif not used:
                residual.copy_(copy)

    def restore_later(self, is_used: IsUsed) -> None:
        """Restore them when somebody needs the residuals, because the answer is not there yet."""
        self._is_used = is_used

    def settle(self) -> None:
        """Restore now what was to be restored later."""
        if self._is_used is not None:
            self.restore(self._is_used)
