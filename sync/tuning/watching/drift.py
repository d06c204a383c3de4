"""Rules by which a training leaves its plan: when steps take another time than those of the trials.

A *window* is the median step of :data:`WINDOW` consecutive ones, on the slowest rank. Nothing here measures or
communicates, so every rule is tested with numbers. All ranks see the same windows, and come to the same actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

WINDOW = 100
"""Steps of a window."""
DRIFT = 0.15
"""The relative distance from the expected step from which a window counts as another time."""
PATIENCE = 3
"""Windows in a row that must say the same."""
NONE_GAIN = 0.02
"""How much slower than plain steps a compressed one must be, relative to these, until plain ones are tried again."""
LINK_FACTOR = 2.0
"""The factor by which waiting for the network must have changed, so that one window is enough."""
SUDDEN = 0.3
"""The least relative change of the step with it. A short wait doubles by chance."""
REPLAN_STEPS = 1000
"""Steps from one plan to the next."""
SUDDEN_STEPS = 200
"""Steps from one plan to the next if the network has changed in between."""
FORGET = 4
"""An action is forgotten after as many times the steps for which the next one had to wait."""


class Action(Enum):
    """The consequence of a window."""

    STAY = "stay"
    TRY_NONE = "try none"  # try plain steps against the plan
    REPLAN = "replan"  # record, plan and try again, with the profile that there is
    REPLAN_LINK = "replan for another link"  # likewise, with a profile of the network as it is now


@dataclass(frozen=True)
class Expected:
    """The steps that are expected, as the last trials have measured them.

    Attributes:
        step_s: seconds of a step with the plan.
        none_s: seconds of a plain step; ``None`` if not known. If nothing is compressed, the same as ``step_s``.
        compute_s: seconds of a step that does not wait for the network; 0 if not known.
        compresses: whether the plan compresses anything.
    """

    step_s: float
    none_s: float | None
    compute_s: float
    compresses: bool

    def distance(self, step_s: float) -> float:
        """The relative distance of a step from the expected one, positive if it is slower."""
        return step_s / self.step_s - 1.0 if self.step_s else 0.0

    def waiting(self, step_s: float) -> float:
        """How many times as long as expected a step waits for the network. Less than :data:`DRIFT` of the expected step
        is no wait but noise, and counts as that much."""
        least_s = DRIFT * self.step_s
        before_s, now_s = (max(each - self.compute_s, least_s) for each in (self.step_s, step_s))
        return now_s / before_s if before_s else 1.0

    def is_sudden(self, step_s: float) -> bool:
        """Whether a step must have another network: it waits for it more than twice, or less than half as long."""
        factor = self.waiting(step_s)
        return max(factor, 1.0 / factor) > LINK_FACTOR and abs(self.distance(step_s)) > SUDDEN


@dataclass(frozen=True)
class Allowance:
    """The steps from one action to the next. They double with every action, until one is forgotten.

    Attributes:
        least: the steps after the first action.
        wait: the steps after the last action.
        since: the steps since the last action; ``None`` before the first, which need not wait.
    """

    least: int
    wait: int = 0
    since: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether an action is allowed now."""
        return self.since is None or self.since >= self.wait

    def later(self, steps: int) -> Allowance:
        """The allowance some steps later."""
        return self if self.since is None else replace(self, since=self.since + steps)

    def spent(self) -> Allowance:
        """The allowance after an action."""
        forgotten = self.since is None or self.since >= FORGET * self.wait
        return replace(self, wait=self.least if forgotten else 2 * self.wait, since=0)


@dataclass(frozen=True)
class Drift:
    """The windows so far.

    Attributes:
        expected: the steps that are expected.
        away: windows in a row that were slower than expected; negative for windows that were faster.
        lost: windows in a row in which the compressed step was slower than the plain one.
        replans: allowance of new plans.
        sudden: allowance of new plans for another network.
        tries: allowance of trials of plain steps.
    """

    expected: Expected
    away: int = 0
    lost: int = 0
    replans: Allowance = field(default_factory=lambda: Allowance(REPLAN_STEPS))
    sudden: Allowance = field(default_factory=lambda: Allowance(SUDDEN_STEPS))
    tries: Allowance = field(default_factory=lambda: Allowance(REPLAN_STEPS))

    def after(self, step_s: float, steps: int = WINDOW) -> tuple[Drift, Action]:
        """The state after a window, and what is to be done.

        Steps that are faster than expected ask for no other plan. Compressed ones only ask whether plain steps have
        become faster still; plain ones are what is expected from then on. If a network is another one at once, plans
        are made anew for it, but not while plain steps have become faster.

        Args:
            step_s: the median step of the window on the slowest rank.
            steps: the steps of the window.
        """
        expected, distance = self.expected, self.expected.distance(step_s)
        if abs(distance) <= DRIFT:
            away = 0
        elif distance > 0:
            away = max(self.away, 0) + 1
        else:
            away = min(self.away, 0) - 1
        loses = expected.compresses and expected.none_s is not None and step_s > expected.none_s * (1.0 + NONE_GAIN)
        later = replace(
            self,
            away=away,
            lost=self.lost + 1 if loses else 0,
            replans=self.replans.later(steps),
            sudden=self.sudden.later(steps),
            tries=self.tries.later(steps),
        )
        if away <= -PATIENCE and not expected.compresses:
            return replace(later, expected=replace(expected, step_s=step_s, none_s=step_s), away=0), Action.STAY
        can_gain = expected.compresses or distance > 0
        if can_gain and expected.is_sudden(step_s) and later.sudden.is_open:
            return replace(later, sudden=later.sudden.spent(), away=0, lost=0), Action.REPLAN_LINK
        if away >= PATIENCE and later.replans.is_open:
            return replace(later, replans=later.replans.spent(), away=0, lost=0), Action.REPLAN
        if (later.lost >= PATIENCE or away <= -PATIENCE) and later.tries.is_open:
            return replace(later, tries=later.tries.spent(), away=0, lost=0), Action.TRY_NONE
        return later, Action.STAY

    @property
    def waits(self) -> tuple[Allowance, ...]:
        """The allowances, for :meth:`with_waits`."""
        return self.replans, self.sudden, self.tries

    def with_waits(self, waits: Sequence[Allowance]) -> Drift:
        """The state with other allowances, as :attr:`waits` gives them; unchanged without any."""
        if not waits:
            return self
        replans, sudden, tries = waits
        return replace(self, replans=replans, sudden=sudden, tries=tries)

    def renewed(self, expected: Expected) -> Drift:
        """The state after new trials: other steps are expected, and the allowances go on."""
        return replace(self, expected=expected, away=0, lost=0)
