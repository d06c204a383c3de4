"""The accuracy guard: rules by which a unit gets a finer compressor, from norms of real gradients and residuals.

A plan is chosen with the errors that its compressors had on a few gradients. Gradients change while a training runs.
The guard sees every compressed unit once in a window. If the error has left its class, or the residual grows
without bound, in :data:`PATIENCE` windows with readings in a row, the unit has a *fault*.

With an error of at most ``e`` in every step, a residual is at most ``e / (1 - e)`` times as large as the largest
gradient. One that is twice as large, and still grows, has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gckernels.codec import Codec

from ...accuracy.accuracy import AccuracyLike, as_accuracy
from ...plans.plan import Plan
from ...traces.model_trace import ModelTrace
from ...traces.traced_tensors import Role

PATIENCE = 3
"""Readings in a row that must say the same."""
ANY_ERROR = 1.0
"""The error from which a compressor that the user has named is faulty: it leaves more than it was given."""
MARGIN = 1.1
"""How much the error of one step may be above the limit: limits are for means over several steps."""
BEYOND = 2.0
"""How many times its bound a residual must be."""


@dataclass(frozen=True)
class Reading:
    """The numbers of a unit in one step, on the rank where they are worst."""

    error: float  # the relative encoding error; infinity if only the residual is not finite
    residual: float  # the same norm relative to that of the gradient, or of what a compressor with a velocity adds


@dataclass(frozen=True)
class Fault:
    """A unit whose compressor is too coarse."""

    key: str  # the unit
    error: float  # its last error
    limit: float  # the largest error of its class
    residual: float  # norm of its residual relative to that of its gradient
    grows: bool  # whether the residual grows without bound; otherwise the error has left its class


@dataclass(frozen=True)
class Course:
    """The readings of a unit so far."""

    limit: float  # the largest error of its class
    over: int = 0  # readings in a row with a larger error
    growing: int = 0  # readings in a row with a residual beyond its bound that is larger than the one before
    residual: float = 0.0  # the last relative residual

    def after(self, reading: Reading) -> Course:
        """The course with one more reading."""
        largest = min(max(self.limit, reading.error), 0.99)
        is_beyond = reading.residual > max(BEYOND * largest / (1.0 - largest), self.residual)
        is_over = reading.error > min(MARGIN * self.limit, ANY_ERROR)
        return replace(
            self,
            over=self.over + 1 if is_over else 0,
            growing=self.growing + 1 if is_beyond else 0,
            residual=reading.residual,
        )

    @property
    def is_faulty(self) -> bool:
        """Whether enough readings in a row were bad."""
        return max(self.over, self.growing) >= PATIENCE


@dataclass(frozen=True)
class Guard:
    """The guard of a plan."""

    courses: Mapping[str, Course] = field(default_factory=dict)
    """The courses of all units that have readings, by their keys."""
    low_rank: tuple[str, ...] = ()  # the units of low-rank methods among them

    @staticmethod
    def of(plan: Plan, accuracy: AccuracyLike, trace: ModelTrace | None = None) -> Guard:
        """The guard of a plan, before the first reading.

        Args:
            accuracy: the rule that the plan was chosen by.
            trace: the trace of the model, which knows the roles of tensors; without it all are weights.
        """
        roles = {} if trace is None else {tensor.name: tensor.role for tensor in trace.tensors}
        rule = as_accuracy(accuracy)
        is_named = rule.named is not None
        watched = [
            unit
            for unit in plan.units
            # a majority vote has no error, and unbiased compressors without feedback may have larger ones than any
            # limit, if the user names them
            if not unit.in_place and unit.compressor.traits.averages and (unit.has_residual("worker") or not is_named)
        ]
        limits = {
            unit.key: min(
                ANY_ERROR,
                *(rule.limit_of(unit.compressor, roles.get(name, Role.WEIGHT)) for name in unit.parameters),
            )
            for unit in watched
        }
        low_rank = tuple(unit.key for unit in watched if not isinstance(unit.compressor, Codec))
        return Guard({key: Course(limit) for key, limit in limits.items()}, low_rank)

    @property
    def keys(self) -> tuple[str, ...]:
        """The units, in an order that is the same on all ranks."""
        return tuple(self.courses)

    def after(self, readings: Mapping[str, Reading]) -> tuple[Guard, tuple[Fault, ...]]:
        """The guard after a window, and the units that are faulty now.

        Args:
            readings: by key; units without a gradient have none.
        """
        courses = {
            key: course.after(readings[key]) if key in readings else course for key, course in self.courses.items()
        }
        faults = tuple(
            Fault(key, readings[key].error, course.limit, course.residual, course.over < PATIENCE)
            for key, course in courses.items()
            if key in readings and course.is_faulty
        )
        return replace(self, courses=courses), faults
