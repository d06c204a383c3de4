"""Rules of a tuned training: which compressors are measured and tried, from which step on, and which plans may run.

:func:`refusal` alone says whether a rule allows a plan that was not found just now: one of a checkpoint, one that the
training has given, or the one that has run so far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gckernels.compressor import Compressor, from_spec
from gckernels.ops import Identity

from ...accuracy.accuracy import (
    SAFE_ERROR,
    Accuracy,
    AccuracyLike,
    as_accuracy,
    is_safe,
    relative_error,
    start_step,
    unfitted,
)
from ...accuracy.slowdown import slowdown
from ...plans.names import short_spec
from ...plans.plan import Plan
from ...traces.model_trace import ModelTrace
from ...traces.traced_tensors import TracedTensor, TraceError

CANDIDATES = ("Cast16", "BlockQuant", "BlockQuant(bits=4)", "EFSignSGD", "PowerSGD", "ChunkTopK")
"""The compressors that are measured if no list names others: the fastest ones of different precision. All registered
ones would take longer than a training should wait."""
WARMUP = 1
"""Steps before the recorded ones, which follow a turn of plain steps."""
RECORDED = 5
"""Steps that are recorded."""
STEPS = 60
"""Steps from the beginning of tuning until a plan is chosen, if no plans are close."""


@dataclass(frozen=True)
class Phase:
    """A part of the training that is tuned by one rule of accuracy."""

    name: str  # the name of the rule, for people
    accuracy: Accuracy  # the rule
    first_step: int  # the step at which tuning begins
    slows: bool = False  # whether errors make a training longer, because of its optimizer
    notes: tuple[str, ...] = ()  # clauses about the rule, for decisions

    @property
    def methods(self) -> tuple[Compressor, ...]:
        """The compressors that are measured and tried."""
        if self.accuracy.named is not None:
            return self.accuracy.named
        matrix = TracedTensor("matrix", 1, 0.0)
        return tuple(each for each in map(from_spec, CANDIDATES) if self.accuracy.allows(each, matrix))

    @property
    def is_aggressive(self) -> bool:
        """Whether larger errors are allowed than by the rule ``"safe"``, and not in a list of compressors."""
        return self.accuracy.named is None and self.accuracy.limit > SAFE_ERROR

    def saying(self, note: str) -> Phase:
        """The same part, with one more clause in its decisions if it is aggressive; others treat all matrices alike."""
        return replace(self, notes=(*self.notes, note)) if self.is_aggressive else self

    def slowdown(self, plan: Plan, trace: ModelTrace) -> float:
        """How many times as many steps a training needs with the error of a plan; 1 if errors are not known, or do not
        count.
        """
        if self.slows:
            with contextlib.suppress(TraceError):
                return slowdown(relative_error(plan, trace))
        return 1.0

    @property
    def allowed(self) -> str:
        """The name of the rule and the errors or compressors that it allows, by which rules are compared."""
        rule = self.accuracy
        allowed = (rule.limit, rule.low_rank_limit) if rule.named is None else rule.named
        return f"{self.name}: {', '.join(map(str, allowed))}"


def rule_at(stages: Sequence[Phase], step: int) -> Phase:
    """The rule that holds at a step. Before the first one begins, nothing may be compressed.

    Args:
        stages: the rules, in order; at least one.
        step: the number of the step.
    """
    begun = [stage for stage in stages if stage.first_step <= step]
    return begun[-1] if begun else Phase(f"exact until step {stages[0].first_step:,}", Accuracy(0.0), 0)


def refusal(plan: Plan, trace: ModelTrace, stage: Phase) -> str:
    """The reason why a rule does not allow a plan, as a clause; empty if it allows it.

    Args:
        trace: the trace of the model, with the errors that are known of compressors; others are assumed.
        stage: the rule.
    """
    tensors = {tensor.name: tensor for tensor in trace.tensors}
    refused: dict[str, None] = {}
    for unit in plan.units:
        method = unfitted(unit.compressor)
        of_unit = [tensors.get(name, TracedTensor(name, unit.numel, 0.0)) for name in unit.parameters]
        if method != Identity() and not all(stage.accuracy.admits(method, tensor) for tensor in of_unit):
            refused[short_spec(method)] = None
    return f"the rule {stage.name} does not allow {', '.join(refused)}" if refused else ""


def stages_of(accuracy: AccuracyLike, steps: int | None = None, first_step: int = 0) -> tuple[Phase, ...]:
    """The stages of a training, in order.

    An aggressive rule is preceded by a safe one, if there is time to tune that.

    Args:
        accuracy: the rule of accuracy, as for :func:`gckernels.sync.accuracy.accuracy.as_accuracy`.
        steps: the number of steps of the whole training.
        first_step: the first step that may be compressed.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """
    rule = as_accuracy(accuracy)
    name = accuracy if isinstance(accuracy, str) else "given by a list" if rule.named is not None else f"{rule.limit:g}"
    late = start_step(rule, steps)
    last = Phase(name, rule, max(late, first_step))
    if late < first_step + 2 * STEPS:
        return (last,)
    safe = as_accuracy("safe" if rule.named is None else [method for method in rule.named if is_safe(method)])
    return (Phase("safe", safe, first_step), last)


@dataclass(frozen=True)
class Rules:
    """The rules of a tuned training, and what is known of its model before any step is recorded."""

    stages: tuple[Phase, ...]  # the rules, in order; at least one
    model: ModelTrace  # a trace of the model without times and errors
    weights: Compressor | None = None  # the compressor that may encode parameters; None if none may

    def refusal(self, plan: Plan, step: int, trace: ModelTrace | None = None) -> str:
        """The reason why a plan may not run at a step; empty if it may.

        Args:
            step: the number of the step.
            trace: a trace of the model with errors of compressors; ``None`` if there is none.
        """
        if plan.weights not in (None, self.weights):
            return f"this training does not allow parameters by {short_spec(plan.weights)}"
        return refusal(plan, trace or self.model, rule_at(self.stages, step))
