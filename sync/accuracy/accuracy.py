"""Rules by which a compressor may be used on a tensor, so that training loses no accuracy, or little.

A rule looks at the relative error ``e = |p - decode(encode(p))| / |p|`` that the compressor has on the tensor's
gradients (see ``errors.py``), and at its traits. So it holds for any registered compressor.

- ``"exact"``: no compressor; only the program is chosen.
- ``"safe"``: error feedback or unbiased, and ``e <= 0.2``; or so precise that neither is needed, ``e <= 2**-8``, as
  with 16-bit floats. A vector may only use a compressor whose payloads are added, as in ``sync.uniform_plan``.
- ``"aggressive"``: beside these, error feedback and ``e <= 0.9``, or ``e <= 0.96`` of a low-rank method, but not for
  embeddings and the last layer. Training should begin without them (:func:`start_step`), and may lose accuracy. A
  training that finds its plans allows less in front of optimizers that normalise gradients (``slowdown.py``).
- a number from 0 to 1: the same rules with this largest error for all methods; above 0.2 those of ``"aggressive"``.
- a list of compressors: these, whatever their errors are.

Compressors that change what the optimizer sees, such as a momentum, a majority vote, or entries chosen at random
whatever their size, are used only if a list names them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import COMPRESSORS, Compressor, from_spec
from gckernels.ops import BlockQuant, Identity, PowerSGD, RandomK

from ..plans.arguments import as_method
from ..plans.plan import Plan
from ..traces.model_trace import ModelTrace
from ..traces.traced_tensors import Role, TracedTensor, TraceError

SAFE_ERROR = 0.2
AGGRESSIVE_ERROR = 0.9
LOW_RANK_ERROR = 0.96
"""The largest error of a low-rank method that ``"aggressive"`` allows. Steps begin with the basis of the one before, so
what lasts is sent sooner or later, although every step leaves most of the norm out. With the same bytes, trainings lose
less by it than by signs, whose error is smaller (docs/measurements.md, "Accuracy")."""
ROUNDING = 2.0**-8
"""The largest error without feedback of a compressor that is not unbiased: that of 16-bit floats is a fifth of it."""
START = 10  # a tenth of an aggressive training, its beginning, is exact


@dataclass(frozen=True)
class Accuracy:
    """A rule of accuracy.

    Attributes:
        limit: the largest relative error.
        low_rank_limit: the largest relative error of low-rank methods, unless ``limit`` is larger.
        named: the compressors of a list, which need no other rule; ``None`` without a list.
    """

    limit: float
    low_rank_limit: float = 0.0
    named: tuple[Compressor, ...] | None = None

    @property
    def largest(self) -> float | None:
        """The largest relative error of any method; ``None`` for a list."""
        return max(self.limit, self.low_rank_limit) if self.named is None else None

    @property
    def is_aggressive(self) -> bool:
        """Whether compressors are allowed that may lose accuracy."""
        if self.named is not None:
            return not all(is_safe(method) for method in self.named)
        return self.limit > SAFE_ERROR

    def allows(self, method: Compressor, tensor: TracedTensor) -> bool:
        """Whether the method may be chosen for the tensor.

        Args:
            method: the method, not fitted to the shape.
            tensor: the tensor.
        """
        return (tensor.role is not Role.VECTOR or method.traits.summable) and self.admits(method, tensor)

    def admits(self, method: Compressor, tensor: TracedTensor) -> bool:
        """Whether the method loses no more of the tensor than the rule allows, so that a plan with it may run.

        Args:
            method: the method, not fitted to the shape.
            tensor: the tensor.
        """
        if self.named is not None:
            return method in self.named
        found = error_on(tensor, method)
        limit = self.limit_of(method, tensor.role)
        return bool(self.limit) and found is not None and keeps_meaning(method) and found.value <= limit

    def limit_of(self, method: Compressor, role: Role) -> float:
        """The largest error of a method on a tensor; infinity for a list.

        Args:
            method: the method.
            role: the role of the tensor.
        """
        if self.named is not None:
            return math.inf
        limit = max(self.limit, self.low_rank_limit) if isinstance(method, PowerSGD) else self.limit
        if role in (Role.EMBEDDING, Role.OUTPUT, Role.VECTOR) or not method.traits.needs_feedback:
            limit = min(limit, SAFE_ERROR)
        if not (method.traits.needs_feedback or method.traits.unbiased):
            limit = min(limit, ROUNDING)
        return limit


AccuracyLike: TypeAlias = str | float | Iterable[Compressor | str] | Accuracy
"""``"exact"``, ``"safe"``, ``"aggressive"``, a number from 0 to 1, compressors, or a rule."""


@dataclass(frozen=True)
class RelativeError:
    """The relative error of a compressor on a tensor.

    Attributes:
        value: the error.
        assumed: whether the trace does not have it, so that it is that on synthetic gradients.
    """

    value: float
    assumed: bool


def as_accuracy(given: AccuracyLike) -> Accuracy:
    """The rule that ``given`` stands for.

    Raises:
        TypeError, ValueError: ``given`` is not valid.
    """
    rules = {
        "exact": Accuracy(0.0),
        "safe": Accuracy(SAFE_ERROR),
        "aggressive": Accuracy(AGGRESSIVE_ERROR, LOW_RANK_ERROR),
    }
    allowed = "'exact', 'safe', 'aggressive', a number from 0 to 1, or a list of compressors"
    if isinstance(given, Accuracy):
        return given
    if isinstance(given, str):
        if given not in rules:
            raise ValueError(f"accuracy must be {allowed}, got {given!r}; write [{given!r}] for one compressor")
        return rules[given]
    if isinstance(given, int | float) and not isinstance(given, bool):
        if not 0 <= given <= 1:
            raise ValueError(f"accuracy must be {allowed}, got {given!r}")
        return Accuracy(float(given))
    if isinstance(given, Iterable) and not isinstance(given, Mapping | bytes):
        named = tuple(dict.fromkeys(as_method("accuracy: an entry", each) for each in given))
        return Accuracy(math.inf, named=named)
    raise TypeError(f"accuracy must be {allowed}, got {type(given).__name__}")


def allowed_compressors(trace: ModelTrace, accuracy: AccuracyLike = "safe") -> dict[str, tuple[Compressor, ...]]:
    """The compressors that each tensor may use beside :class:`~gckernels.Identity`, fitted to its shape, by its name.

    The candidates are those that the trace has measured, or all registered compressors if it has measured none. Every
    allowed compressor keeps within the largest error on every tensor, so the error of the whole gradient does, too.

    Args:
        trace: the trace of the model.
        accuracy: the rule.

    Raises:
        TypeError, ValueError: ``accuracy`` is not valid.
    """
    rule = as_accuracy(accuracy)
    methods = candidates(trace) if rule.named is None else rule.named
    allowed = {}
    for tensor in trace.tensors:
        fitting = [(method, fitted(method, tensor)) for method in methods if method != Identity()]
        allowed[tensor.name] = tuple(fit for method, fit in fitting if fit is not None and rule.allows(method, tensor))
    return allowed


def start_step(accuracy: AccuracyLike, steps: int | None = None) -> int:
    """The first step that is compressed: a tenth of ``steps`` if the rule is aggressive, otherwise 0.

    Gradients change fastest when a training begins, and error feedback of a coarse compressor then adds old ones.

    Args:
        accuracy: the rule.
        steps: the number of steps of the whole training.

    Raises:
        ValueError: ``steps`` is not valid, or is ``None`` where the rule needs it. A list of compressors does not.
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps must be None or an int from 1 up, got {steps!r}")
    rule = as_accuracy(accuracy)
    if not rule.is_aggressive:
        return 0
    if steps is None:
        if rule.named is not None:
            return 0
        raise ValueError(
            "accuracy: aggressive compressors take over after a tenth of the training; give its number of steps, "
            "steps=, or choose accuracy='safe'"
        )
    return -(-steps // START)


def relative_error(plan: Plan, trace: ModelTrace) -> float:
    """The relative error of the whole gradient under a plan: the root of the mean of the squared errors of its tensors,
    weighted by the squared norms of their gradients.

    Where the trace has no norms, all elements weigh alike. Only the first encoding on each rank is counted.

    Raises:
        TraceError: the plan has a tensor that the trace does not have, or a compressor of which no error is known.
    """
    tensors = trace.by_name
    squares = _squared_norms(trace)
    left = 0.0
    for unit in plan.units:
        for name in unit.parameters:
            if name not in tensors:
                raise TraceError(
                    f"{name}: in the plan, but not in the trace of {trace.model}; use the trace of its model"
                )
            if isinstance(unit.compressor, Identity) or not tensors[name].numel:
                continue
            found = error_on(tensors[name], unit.compressor)
            if found is None:
                raise TraceError(f"{name}: no error of {unit.compressor} is known; record a trace with this compressor")
            share = 1.0 if unit.also else unit.numel / tensors[name].numel
            left += squares[name] * share * found.value**2
    total = sum(squares.values())
    return math.sqrt(left / total) if total else 0.0


def error_on(tensor: TracedTensor, method: Compressor) -> RelativeError | None:
    """The relative error of a method on a tensor, measured if the trace has it; ``None`` if it is not known.

    Args:
        tensor: the tensor.
        method: the method, fitted to the shape or not.
    """
    method = unfitted(method)
    error = tensor.errors.get(str(method))
    if error is None:  # a spec by hand may leave defaults out
        error = next((error for spec, error in tensor.errors.items() if _method(spec) == method), None)
    if error is not None:
        return RelativeError(error, assumed=False)
    from .errors import assumed_error

    value = assumed_error(method)
    return None if value is None else RelativeError(value, assumed=True)


def keeps_meaning(method: Compressor) -> bool:
    """Whether the decoded gradients mean to the optimizer what the gradients do."""
    traits = method.traits
    is_chosen = not isinstance(method, RandomK)  # its entries are sent whatever they are, most of the norm is late
    return traits.averages and traits.conserves and not traits.applies_momentum and is_chosen


def is_safe(method: Compressor) -> bool:
    """Whether the rule ``"safe"`` allows the method on a matrix with synthetic gradients."""
    return Accuracy(SAFE_ERROR).allows(method, TracedTensor("matrix", 1, 0.0))


def candidates(trace: ModelTrace) -> tuple[Compressor, ...]:
    """The methods that may be chosen for a model: those that the trace has measured, or else the default ones."""
    specs = dict.fromkeys(spec for tensor in trace.tensors for spec in tensor.errors)
    measured = tuple(method for method in map(_method, specs) if method is not None and method != Identity())
    return measured if specs else candidates_by_default()


def candidates_by_default() -> tuple[Compressor, ...]:
    """All registered methods that keep the meaning of gradients, with their defaults, and 4-bit blocks."""
    methods = [method for method in map(_method, COMPRESSORS) if method is not None]  # a user's may have no defaults
    return (*(method for method in methods if keeps_meaning(method) and method != Identity()), BlockQuant(bits=4))


def fitted(method: Compressor, tensor: TracedTensor) -> Compressor | None:
    """The method for the shape of a tensor; ``None`` if it does not take it, or needs a shape that is not known."""
    if tensor.dtype not in GRAD_DTYPES:
        return None
    if tensor.shape is None:
        return method if isinstance(method, Codec) else None
    fit = method.fit(tensor.shape)
    return fit if fit.name == method.name else None


def unfitted(method: Compressor) -> Compressor:
    """The method as it is before it is fitted to a shape."""
    return replace(method, rows=None) if isinstance(method, PowerSGD) else method


@functools.lru_cache(maxsize=1024)
def _method(spec: str) -> Compressor | None:
    """The method of a spec; ``None`` if this process does not have it, such as one of another user."""
    try:
        return from_spec(spec)
    except ValueError:
        return None


def _squared_norms(trace: ModelTrace) -> dict[str, float]:
    known = [tensor for tensor in trace.tensors if tensor.norm is not None and tensor.numel]
    numel = sum(tensor.numel for tensor in known)
    mean = sum((tensor.norm or 0.0) ** 2 for tensor in known) / numel if numel else 1.0
    return {tensor.name: tensor.numel * mean if tensor.norm is None else tensor.norm**2 for tensor in trace.tensors}
