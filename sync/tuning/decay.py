"""Decay of residuals in front of an optimizer like Adam.

Adam divides a gradient by the root of its second moment, which is that of the last gradients. A residual of a coarse
compressor comes at a size that the second moment does not expect, and makes steps too long. Residuals that decay keep
less back (``bench/training/updates.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace

import torch

from gckernels.codec import Codec

from ..accuracy.accuracy import is_safe
from ..frontends.checks.hooks import weakly
from ..frontends.checks.optimizer_checks import at_first_step, is_adaptive
from ..plans.plan import Plan

ADAPTIVE_DECAY = 0.5
"""The decay that has been best for signs and sparse values in front of Adam."""


class ResidualDecay:
    """Lets residuals of plans decay, if an optimizer like Adam steps the parameters.

    Args:
        parameters: the parameters of the training.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._is_adaptive = False
        self._handle = at_first_step(parameters, weakly(self._note))
        weakref.finalize(self, self._handle.remove).atexit = False

    def close(self) -> None:
        """End the watch of optimizers. Further calls do nothing."""
        self._handle.remove()

    def of(self, plan: Plan) -> Plan:
        """The plan as it is to run. Residuals decay of element-wise compressors that only an aggressive rule allows;
        low-rank methods lose by it."""
        if not self._is_adaptive:
            return plan
        units = (
            unit.decaying(ADAPTIVE_DECAY)
            if isinstance(unit.compressor, Codec) and not is_safe(unit.compressor)
            else unit
            for unit in plan.units
        )
        return replace(plan, units=tuple(units))

    def _note(self, optimizer: torch.optim.Optimizer, groups: object) -> None:
        """Note the kind of the optimizer that steps the parameters."""
        self._is_adaptive = is_adaptive(optimizer)
