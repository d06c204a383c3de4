"""The cost of errors of gradients in front of an optimizer that normalises them, such as Adam or Muon.

Its steps have one length, whatever that of a gradient is. A coarse compressor adds noise, and error feedback replays
old gradients; both take a part of that length from the gradient. So a training needs more steps for the same loss. With
SGD, steps are as long as gradients, and error feedback brings all of a gradient sooner or later.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .accuracy import Accuracy

LARGEST_ERROR = 0.4
"""The largest relative error of gradients in front of such an optimizer, unless a list names compressors. Beyond it,
trainings lose more than 0.03 bits (docs/howto/slow_link.md)."""
STEEPNESS = 0.7
"""The logarithm of how many times as many steps a training needs, over the square of the error. It is 0.4 to 1 for the
compressors of docs/howto/slow_link.md in front of AdamW, by the loss of plain DDP after 400 and 900 steps and by their
errors on that transformer (0.14 for 4 bits, 0.54 for ``PowerSGD``, 0.61 for signs, 0.83 for sparse values)."""


def slowdown(error: float) -> float:
    """How many times as many steps a training needs with a relative error of the whole gradient, from 1 on."""
    return math.exp(STEEPNESS * error**2)


def restrained(rule: Accuracy) -> Accuracy:
    """A rule of accuracy as it holds in front of such an optimizer. A list of compressors stays as it is."""
    if rule.named is not None:
        return rule
    return replace(rule, limit=min(rule.limit, LARGEST_ERROR), low_rank_limit=min(rule.low_rank_limit, LARGEST_ERROR))
