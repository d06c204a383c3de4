"""The settings of a training that finds its plans itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..accuracy.accuracy import AccuracyLike
    from .trials.rules import Phase


@dataclass(frozen=True)
class Auto:
    """Find a plan while the model is trained, and keep it only if it makes steps faster::

        sync.attach(model, sync.Auto(accuracy="aggressive", steps=10_000))

    Nothing is measured before the first step. Plain averaging runs for some steps, then every compressor that
    ``accuracy`` allows in a turn of five, and the fastest plan stays, often plain averaging. This takes about 50 steps,
    or up to 130 if several plans are close. Whatever fails ends this with a warning, and plain averaging goes on.

    Attributes:
        accuracy: the compressors that may be used. ``"exact"`` is none; ``"safe"`` those that lose nothing;
            ``"aggressive"`` also those that may lose a little, after a tenth of the training; a number from 0 to 1 the
            largest relative error of a gradient, which is aggressive above 0.2; or a list of compressors. In front of
            optimizers that are not of SGD's class, or that cannot be seen, aggressive rules allow errors up to 0.4, and
            count errors as time; coarser compressors are for :class:`~gckernels.sync.Updates` there. A plan of a
            loaded state that it does not allow is left by an exact step.
        steps: the number of steps of the whole training; needed for aggressive accuracy.
        replan: whether the plan is compared with others when steps take another time, and now and then. This loses at
            most a hundredth of the time of all steps.
        propose: what proposes more plans for trials, behind those with one compressor. It is called with the training,
            and returns a :class:`~gckernels.sync.tuning.proposers.Proposer`. ``gckernels.planner.proposer`` chooses per
            tensor by a cost model, from what the trials have measured.

    :func:`~gckernels.sync.attach` checks the attributes, so that all ranks raise alike.
    """

    accuracy: AccuracyLike = "safe"
    steps: int | None = None
    replan: bool = True
    propose: Callable[[Any], Any] | None = None  # typed where it is called: attaching loads no more for it

    def __post_init__(self) -> None:
        if isinstance(self.accuracy, Iterator):
            object.__setattr__(self, "accuracy", tuple(self.accuracy))

    def phases(self, first_step: int) -> tuple[Phase, ...]:
        """The rules of accuracy, and when they begin.

        Args:
            first_step: the first step that may be compressed.

        Raises:
            TypeError, ValueError: an attribute is not valid.
        """
        if type(self.replan) is not bool:
            raise TypeError(f"Auto: replan must be True or False, got {self.replan!r}")
        if self.propose is not None and not callable(self.propose):
            raise TypeError(
                f"Auto: propose must be a function such as gckernels.planner.proposer, or None, got {self.propose!r}"
            )
        try:
            from .trials import rules

            return rules.stages_of(self.accuracy, self.steps, first_step)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Auto: {error}") from None

    def lines(self, first_step: int) -> list[str]:
        """Texts of all settings, which must be the same on all ranks."""
        return [
            f"tuned, steps {self.steps}, replan {self.replan}, propose {_name_of(self.propose)}",
            *map(str, self.phases(first_step)),
        ]


def _name_of(function: Any) -> str:
    """The full name of a function, or of the type of another object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
