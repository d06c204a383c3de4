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
from torch.optim.optimizer import register_optimizer_step_post_hook

from gckernels.codec import Codec

from ..accuracy.accuracy import is_safe
from ..frontends.checks.hooks import weakly
from ..frontends.checks.optimizer_checks import groups_with, is_adaptive
from ..plans.plan import Plan

ADAPTIVE_DECAY = 0.5
"""The decay that has been best for signs and sparse values in front of Adam."""


class ResidualDecay:
    """Lets residuals of plans decay, if an optimizer like Adam steps the parameters.

    Args:
        parameters: the parameters of the training.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._ids = {id(parameter) for parameter in parameters}  # no references, which would keep the model alive
        self._is_adaptive = False
        self._handle = register_optimizer_step_post_hook(weakly(self._look))
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

    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the kind of an optimizer that steps the parameters."""
        if any(groups_with(optimizer, self._ids)):
            self._is_adaptive = is_adaptive(optimizer)
            self._ids.clear()  # hooks of optimizers cannot be removed while they run
