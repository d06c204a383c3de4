"""Rules of a tuned training: which compressors are measured and tried, and from which step on."""

from __future__ import annotations

from dataclasses import dataclass

from gckernels.method import Method, from_spec

from ..planner.accuracy import Accuracy, AccuracyLike, as_accuracy, is_safe, start_step
from ..planner.trace import TracedTensor

CANDIDATES = ("Cast16", "BlockQuant", "BlockQuant(bits=4)", "EFSignSGD", "PowerSGD", "ChunkTopK")
"""The compressors that are measured if no list names others: the fastest ones of different precision. All registered
ones would take longer than a training should wait."""
WARMUP = 3
"""Plain steps before the recorded ones."""
RECORDED = 5
"""Steps that are recorded."""
STEPS = 60
"""Steps from the beginning of tuning to its end."""
MORE = 400
"""Steps by which it ends later at most, if noise hides whether some plan is faster than plain steps."""


@dataclass(frozen=True)
class Stage:
    """A part of the training that is tuned by one rule of accuracy.

    Attributes:
        name: the name of the rule, for people.
        accuracy: the rule.
        first_step: the step at which tuning begins.
    """

    name: str
    accuracy: Accuracy
    first_step: int

    @property
    def methods(self) -> tuple[Method, ...]:
        """The compressors that are measured and tried."""
        if self.accuracy.named is not None:
            return self.accuracy.named
        matrix = TracedTensor("matrix", 1, 0.0)
        return tuple(each for each in map(from_spec, CANDIDATES) if self.accuracy.allows(each, matrix))


def stages_of(accuracy: AccuracyLike, steps: int | None = None, first_step: int = 0) -> tuple[Stage, ...]:
    """The stages of a training, in order.

    An aggressive rule is preceded by a safe one, if there is time to tune that.

    Args:
        accuracy: the rule of accuracy, as for :func:`gckernels.sync.planner.accuracy.as_accuracy`.
        steps: the number of steps of the whole training.
        first_step: the first step that may be compressed.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """
    rule = as_accuracy(accuracy)
    name = accuracy if isinstance(accuracy, str) else "given by a list" if rule.named is not None else f"{rule.limit:g}"
    late = start_step(rule, steps)
    last = Stage(name, rule, max(late, first_step))
    if late < first_step + 2 * STEPS:
        return (last,)
    safe = as_accuracy("safe" if rule.named is None else [method for method in rule.named if is_safe(method)])
    return (Stage("safe", safe, first_step), last)
