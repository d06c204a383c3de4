"""Changes: the time of a step while the option of one item at a time is changed."""

from __future__ import annotations

from collections.abc import Sequence

from ..machines.machine import Floats
from .maxplus import Choice, State, Steps, longest
from .rows import BACKWARD

_ROUNDING = 1e-12


class Changes:
    """The time of a step for a choice that is changed one item at a time.

    States before and ways behind a change are kept, so that calls for neighbouring items are cheap.

    Args:
        steps: the times of steps.
        choice: the first choice.
    """

    def __init__(self, steps: Steps, choice: Sequence[int]) -> None:
        self._steps, self._choice = steps, list(choice)
        # the states before each item, after the time that passes before it
        self._before: list[State] = [steps.passed(steps.start(), 0)]
        last = len(self._choice) - 1
        self._behind: dict[int, State] = {last: steps.end()}
        self._behind_from = last

    @property
    def choice(self) -> Choice:
        """The option of each item."""
        return self._choice.copy()

    def step_s(self) -> float:
        """The time of the step."""
        item = len(self._before) - 1  # where the least has to be computed anew
        return longest(self._before[item], self._ahead(item))

    def choose(self, item: int, option: int) -> None:
        """Change the option of an item."""
        if self._choice[item] != option:
            self._choice[item] = option
            del self._before[item + 1 :]
            self._behind_from = max(self._behind_from, item)

    def choose_all(self, choice: Sequence[int]) -> None:
        """Change the options of all items."""
        for item, option in enumerate(choice):
            self.choose(item, option)

    def options_s(self, item: int) -> Floats:
        """``[options]``, the time of the step with each option for one item, the others as they are."""
        return self._steps.times(self._state(item), self._steps.kinds[item], self._ways(item))

    def work_s(self, item: int) -> Floats:
        """``[options]``, the work of each option for an item, on all resources together."""
        total: Floats = self._steps.rows.work_s[self._steps.kinds[item]].sum(axis=1)
        return total

    def is_hidden(self, item: int) -> bool:
        """Whether the step takes as long if the item is submitted, and nothing of it is done.

        With one lane for all communication these are the items before a pause of it: if they were sent faster, the
        pause would be longer and nothing else.
        """
        ways, state = self._ways(item), self._state(item)
        submitted = state.copy()
        submitted[BACKWARD] += self._steps.rows.path(self._steps.kinds[item], self._choice[item]).chains[0].after_s[0]
        return longest(submitted, ways) >= longest(state, self._ahead(item)) * (1 - _ROUNDING)

    def _state(self, item: int) -> State:
        """The state before an item."""
        steps, before = self._steps, self._before
        while len(before) <= item:
            last = len(before) - 1
            before.append(steps.passed(steps.behind(before[last], steps.kinds[last], self._choice[last]), last + 1))
        return before[item]

    def _ahead(self, item: int) -> State:
        """The ways from before an item."""
        return self._steps.ahead(self._ways(item), self._steps.kinds[item], self._choice[item])

    def _ways(self, item: int) -> State:
        """The ways from behind an item."""
        steps = self._steps
        while self._behind_from > item:
            at = self._behind_from
            self._behind[at - 1], self._behind_from = steps.passed(self._ahead(at), at), at - 1
        return self._behind[item]
