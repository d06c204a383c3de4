"""Decay of residuals in front of an optimizer that normalises gradients, such as Adam.

Adam divides a gradient by the root of its second moment, a running mean over recent gradients. A residual of a
coarse compressor comes at a size that the second moment does not expect, and makes steps too long. Residuals that decay
keep less back (``bench/training/updates.py``).
"""

from __future__ import annotations

from dataclasses import replace

from gckernels.codec import Codec

from ..accuracy.accuracy import is_safe
from ..plans.plan import Plan

ADAPTIVE_DECAY = 0.5
"""The decay that has been best for signs and sparse values in front of Adam."""


def decaying(plan: Plan) -> Plan:
    """The plan as it is to run in front of such an optimizer. Residuals decay of element-wise compressors that the rule
    ``"safe"`` does not allow; low-rank methods lose by it."""
    units = (
        unit.decaying(ADAPTIVE_DECAY) if isinstance(unit.compressor, Codec) and not is_safe(unit.compressor) else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units))
