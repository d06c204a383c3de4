"""The optimizers that step the parameters of a tuned training, and what they mean for its rules.

Coarse compressors are for updates where an optimizer normalises gradients (``gckernels.sync.accuracy.slowdown``). An
optimizer may be made long after the model is attached, so its steps are watched. It is known when plans are chosen,
after some plain steps. One that does not derive from torch's cannot be seen, and may be of any kind.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..accuracy.slowdown import restrained
from ..communication.ranks import Ranks
from ..frontends.checks.hooks import weakly
from ..frontends.checks.optimizer_checks import normalises
from ..plans.plan import Plan
from .decay import decaying
from .trials.rules import Phase

_ADVICE = "coarser compressors are for the updates behind it (sync.Updates)"


class Kind(enum.IntEnum):
    """The kind of the optimizers of a training; a later one needs more care."""

    PROPORTIONAL = 0  # steps follow the length of gradients
    UNKNOWN = 1
    NORMALISING = 2


class Optimizers:
    """The optimizers of torch that have stepped the parameters of a training.

    Args:
        parameters: the parameters, whose steps are watched from now on.
        ranks: all ranks.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], ranks: Ranks) -> None:
        trained = [each for each in parameters if each.requires_grad]
        self._ids = {id(each) for each in trained}  # no references, which would keep the model alive
        self._unseen = set(self._ids)  # the parameters that nobody has stepped yet
        self._names: dict[str, bool] = {}  # whether it normalises, by the class of an optimizer
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._ranks = ranks
        self._handle = register_optimizer_step_pre_hook(weakly(self._note))
        weakref.finalize(self, self._handle.remove).atexit = False  # nobody need call close

    def close(self) -> None:
        """End the watch. Further calls do nothing."""
        self._handle.remove()

    def kind(self) -> Kind:
        """The kind of optimizers that needs most care, of all ranks. Collective."""
        seen = Kind.UNKNOWN if self._unseen else Kind.PROPORTIONAL
        if any(self._names.values()):
            seen = Kind.NORMALISING
        return Kind(int(self._ranks.slowest([seen])[0]))

    def rule(self, stage: Phase) -> Phase:
        """A rule as it holds in front of the optimizers. An aggressive one allows less in front of those that are not
        of SGD's class, or not known, and says so. Collective.

        Args:
            stage: the rule.
        """
        kind = self.kind() if stage.is_aggressive else Kind.PROPORTIONAL
        if kind is Kind.PROPORTIONAL:
            return stage
        rule = restrained(stage.accuracy)
        who = ", ".join(sorted(name for name, normalising in self._names.items() if normalising))
        why = f"in front of {who or 'the optimizer of another rank'}"
        if kind is Kind.UNKNOWN:
            why = "where no optimizer of torch has stepped all parameters"
        note = f"the rule {stage.name} allows errors up to {rule.limit:g} {why}; {_ADVICE}"
        return replace(stage.saying(note), accuracy=rule, slows=True)

    def decaying(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """The plans as they are to run: residuals of coarse compressors decay in front of optimizers that normalise
        gradients. Collective."""
        return tuple(map(decaying, plans)) if self.kind() is Kind.NORMALISING else tuple(plans)

    def _note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note an optimizer that begins a step, the first time if it has parameters of the training."""
        if optimizer in self._known:
            return
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if not stepped.isdisjoint(self._ids):
            self._known.add(optimizer)
            self._unseen -= stepped
            self._names[type(optimizer).__name__] = normalises(optimizer)
