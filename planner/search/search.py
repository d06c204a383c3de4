"""The search for drafts: options, parts, channels, places and launches, by estimates of the time of a step.

:class:`Search` improves a draft with :mod:`~.maxplus`. Its times are estimates: the judge is the timeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..drafts.drafts import Draft, LaunchDraft, MessageDraft, Option, draft_of_launches
from ..drafts.problem import Problem
from ..machines.machine import Floats
from .item_rows import Item, RowMaker
from .maxplus import Choice, State, Steps, longest
from .restructure import Move, disjoint, moved, moves_of
from .rows import FINISH, UNUSABLE_S, Gaps, Rows, undominated

MAX_SWEEPS = 4
"""Sweeps of one improvement, if each of them has changed something."""
MAX_PASSES = 6
"""The largest number of times that all moves are tried."""
_KEPT = 3
"""Tables of prices that are kept, which are large for many messages."""
_COMPARED = 1000
"""Options that are priced at once to find out which of them are never better than others."""
_GAIN = 1e-4
"""The relative gain from which a move is made."""


def messages_of_draft(draft: Draft) -> list[MessageDraft]:
    """All messages of a draft, in order."""
    return list(itertools.chain.from_iterable(draft))


def with_options(draft: Draft, options: Sequence[Option]) -> Draft:
    """A draft with other options, one for each message."""
    given = iter(options)
    return tuple(tuple(replace(message, option=next(given)) for message in launch) for launch in draft)


def ready_of(problem: Problem, launch: LaunchDraft) -> float:
    """Seconds from the start of backward until a launch is complete."""
    return max(problem.trace.tensors[tensor].ready_s for message in launch for tensor in message.tensors)


def options_in(draft: Draft) -> tuple[Option, ...]:
    """The options of a draft, without repetition."""
    return tuple(dict.fromkeys(message.option for message in messages_of_draft(draft)))


def choice_in(draft: Draft, options: Sequence[Option]) -> Choice:
    """For each message of a draft the number of its option."""
    number = {option: index for index, option in enumerate(options)}
    return [number[message.option] for message in messages_of_draft(draft)]


class Search:
    """Improves drafts of a problem.

    Args:
        sharing: as for :class:`~.item_rows.RowMaker`.
    """

    def __init__(self, problem: Problem, sharing: bool = True) -> None:
        self.problem, self._maker = problem, RowMaker(problem, sharing)
        self._known: dict[tuple[tuple[Item, ...], tuple[Option, ...]], Rows] = {}

    # ---------------------------------------------------------------- estimates

    def estimate(self, draft: Draft) -> float:
        """The estimated time of a draft, in seconds from the start of backward."""
        options = options_in(draft)
        return self._steps(draft, options).value(choice_in(draft, options))

    def improved(self, draft: Draft, options: Sequence[Option], sweeps: int = MAX_SWEEPS) -> Draft:
        """A draft in which no message alone would be better off with another one of the options.

        Args:
            draft: the first draft.
            options: the options to choose from, besides those of the draft.
            sweeps: the maximum number of sweeps over all messages.
        """
        options = tuple(dict.fromkeys((*options_in(draft), *options)))
        for _ in range(sweeps):
            steps, choice = self._steps(draft, options), choice_in(draft, options)
            if not steps.sweep(choice):
                break
            draft = with_options(draft, [options[index] for index in choice])
        return draft

    def uniform(self, launches: Sequence[Item], options: Sequence[Option], count: int) -> list[Draft]:
        """The best drafts in which all launches are one message with the same option, at most ``count``."""
        draft = draft_of_launches(launches, Option())
        rows = self._rows(self._first(draft), tuple(options))
        behind = np.array([self._maker.lanes.behind([option]) for option in options])[:, None]
        rows = replace(rows, lanes=np.where(rows.lanes == FINISH, behind, rows.lanes))
        kinds, _ = self._maker.kinds([message.tensors for message in messages_of_draft(draft)])
        times = Steps(rows, kinds, self._gaps(draft, rows)).uniform()
        return [with_options(draft, [options[at]] * len(draft)) for at in np.argsort(times, kind="stable")[:count]]

    def shortlist(self, drafts: Sequence[Draft], options: Sequence[Option], count: int) -> list[Option]:
        """The options of drafts, and the best ones of others if all launches of the first draft had the same."""
        launches = [tuple(tensor for message in launch for tensor in message.tensors) for launch in drafts[0]]
        best = [draft[0][0].option for draft in self.uniform(launches, options, count)]
        return list(dict.fromkeys((*(option for draft in drafts for option in options_in(draft)), *best)))

    def neighbours(self, draft: Draft, options: Sequence[Option], count: int) -> list[Move]:
        """The changes of one message's option, and the moves, at most ``count``: those that are estimated to give the
        fastest drafts, the best first."""
        options = tuple(dict.fromkeys((*options_in(draft), *options)))
        steps, choice = self._steps(draft, options), choice_in(draft, options)
        ways, state, times = steps.ways(choice), steps.start(), []
        for item, kind in enumerate(steps.kinds):
            state = steps.passed(state, item)
            times.append(steps.lazy_times(state, kind, ways[item]))
            times[item][choice[item]] = np.inf
            state = steps.behind(state, kind, choice[item])
        moves = moves_of(self.problem, draft)
        values = np.concatenate([*times, self._times_of_moves(draft, moves)[1] if moves else []])
        places = [(launch, place) for launch, messages in enumerate(draft) for place in range(len(messages))]
        found = []
        for at in np.argsort(values, kind="stable")[:count]:
            if values[at] >= UNUSABLE_S:
                break
            item, option = divmod(int(at), len(options))
            if item < len(choice):
                launch, place = places[item]
                changed = list(draft[launch])
                changed[place] = replace(changed[place], option=options[option])
                found.append(Move(launch, launch + 1, (tuple(changed),)))
            else:
                found.append(moves[at - len(choice) * len(options)])
        return found

    def estimates(self, drafts: Sequence[Draft]) -> list[float]:
        """The estimated times of drafts, priced together."""
        messages = list(dict.fromkeys(message for draft in drafts for message in messages_of_draft(draft)))
        options = tuple(dict.fromkeys(message.option for message in messages))
        kinds, first = self._maker.kinds([message.tensors for message in messages])
        kind = dict(zip((message.tensors for message in messages), kinds, strict=True))
        rows = self._rows(tuple(first), options)
        times = []
        for draft in drafts:
            own = rows.finishing_on(self._maker.lanes.behind(options_in(draft)))
            steps = Steps(own, [kind[message.tensors] for message in messages_of_draft(draft)], self._gaps(draft, rows))
            times.append(steps.value(choice_in(draft, options)))
        return times

    def steps(self, draft: Draft, options: Sequence[Option]) -> Steps:
        """The times of steps with any of some options for each message of a draft.

        They are without hooks, which cost the same whatever is chosen.
        """
        steps = self._steps(draft, tuple(options), options)
        firsts = np.zeros(len(steps.kinds) + 1, dtype=bool)
        return Steps(steps.rows, steps.kinds, self._maker.gaps(self._waited_s(draft), firsts, steps.rows))

    def _steps(self, draft: Draft, options: tuple[Option, ...], used: Sequence[Option] | None = None) -> Steps:
        """The times of steps, with launches that are waited for as in a plan with the options ``used``; by default
        those of the draft."""
        kinds, first = self._maker.kinds([message.tensors for message in messages_of_draft(draft)])
        rows = self._rows(tuple(first), options).finishing_on(self._maker.lanes.behind(used or options_in(draft)))
        return Steps(rows, kinds, self._gaps(draft, rows))

    def _gaps(self, draft: Draft, rows: Rows) -> Gaps:
        """The time that passes before each message, with the hooks of launches."""
        firsts = np.array([number == 0 for launch in draft for number in range(len(launch))] + [False])
        return self._maker.gaps(self._waited_s(draft), firsts, rows)

    def _waited_s(self, draft: Draft) -> Floats:
        """The seconds of backward before each message, until its launch is complete, and behind the last one."""
        problem, seconds, before_s = self.problem, [], 0.0
        for launch in draft:
            ready_s = max(before_s, ready_of(problem, launch))
            seconds += [ready_s - before_s, *[0.0] * (len(launch) - 1)]
            before_s = ready_s
        return np.array([*seconds, max(problem.trace.backward_s - before_s, 0.0)])

    def _rows(self, items: tuple[Item, ...], options: tuple[Option, ...]) -> Rows:
        if (items, options) not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[items, options] = self._maker.rows(items, options)
        return self._known[items, options]

    def worthwhile(self, draft: Draft, options: Sequence[Option]) -> list[Option]:
        """The options for which no other one is as good for every message of a draft, whatever the rest of it.

        Options that are not the best of some do not have to be compared with all others, whose prices need much memory.
        """
        items, kept = self._first(draft), []
        for start in range(0, len(options), _COMPARED):
            some = options[start : start + _COMPARED]
            kept += [some[at] for at in undominated(self._maker.rows(items, some))]
        if len(options) > _COMPARED:
            kept = [kept[at] for at in undominated(self._maker.rows(items, kept))]
        return kept

    def _first(self, draft: Draft) -> tuple[Item, ...]:
        """A message of every kind."""
        return tuple(self._maker.kinds([message.tensors for message in messages_of_draft(draft)])[1])

    # ---------------------------------------------------------------- launches and messages

    def restructured(self, draft: Draft) -> Draft:
        """A draft after the moves of :mod:`~.restructure` that make the estimate better."""
        for _ in range(MAX_PASSES):
            better = self._moved(draft)
            if better is None:
                break
            draft = better
        return draft

    def _moved(self, draft: Draft) -> Draft | None:
        """A better draft after some moves; ``None`` if there is no good one."""
        moves = moves_of(self.problem, draft)
        if not moves:
            return None
        before_s, times = self._times_of_moves(draft, moves)
        good = sorted((time, at) for at, time in enumerate(times) if time < before_s * (1.0 - _GAIN))
        if not good:
            return None
        ordered = [moves[at] for _, at in good]
        together = moved(draft, disjoint(ordered))
        return together if self.estimate(together) <= good[0][0] else moved(draft, ordered[:1])

    def _times_of_moves(self, draft: Draft, moves: Sequence[Move]) -> tuple[float, list[float]]:
        """The estimate of a draft, and those after each of some moves alone."""
        old = messages_of_draft(draft)
        changed = [message for move in moves for launch in move.launches for message in launch]
        options = tuple(dict.fromkeys(message.option for message in (*old, *changed)))
        number = {option: index for index, option in enumerate(options)}
        kinds, first = self._maker.kinds([message.tensors for message in (*old, *changed)])
        rows = self._maker.rows(first, options).finishing_on(self._maker.lanes.behind(options_in(draft)))
        steps = Steps(rows, kinds[: len(old)], self._gaps(draft, rows))
        kind = dict(zip((message.tensors for message in (*old, *changed)), kinds, strict=True))
        # the state before each launch, and the ways from behind it
        choice, states, state, item = [number[message.option] for message in old], [], steps.start(), 0
        ways = steps.ways(choice)
        ends: list[State] = []
        for launch in draft:
            states.append(state)
            for _ in launch:
                state = steps.behind(steps.passed(state, item), steps.kinds[item], choice[item])
                item += 1
            ends.append(ways[item - 1])
        ready_s = list(itertools.accumulate((ready_of(self.problem, launch) for launch in draft), max))
        times = []
        for move in moves:
            state, before_s = states[move.first], ready_s[move.first - 1] if move.first else 0.0
            for launch in move.launches:
                launch_s = max(before_s, ready_of(self.problem, launch))
                gap = self._maker.gaps(np.array([launch_s - before_s]), np.array([True]), rows)
                state = steps.after_gap(state, float(gap.seconds[0]), gap.work_s[0].tolist())
                before_s = launch_s
                for message in launch:
                    state = steps.behind(state, kind[message.tensors], number[message.option])
            times.append(longest(state, ends[move.stop - 1]))
        return longest(states[0], steps.passed(steps.ahead(ways[0], steps.kinds[0], choice[0]), 0)), times
