"""Moves that change the messages of a draft: launches merged, split and in another order, exact tensors sent apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ..drafts.drafts import Draft, LaunchDraft, MessageDraft, Option
from ..drafts.problem import Problem

_CUTS = 4
"""Places at which a move tries to split a launch."""
_LATE = 5
"""Launches at the end of a step whose order is changed: one may be sent while another one is encoded or decoded."""
_SMALL = 8
"""Tensors that are this much smaller than the largest one of their message may be sent apart."""


@dataclass(frozen=True)
class Move:
    """A change of a draft."""

    first: int  # the first launch that it replaces
    stop: int  # the launch after the last one that it replaces
    launches: tuple[LaunchDraft, ...]  # the launches that replace them


def moves_of(problem: Problem, draft: Draft) -> list[Move]:
    """All moves. DDP's launches can be neither merged nor split."""
    moves = list(_partings(problem, draft))
    if problem.frontend.plans_launches:
        moves += [*_merges(problem, draft), *_splits(draft)]
    return moves


def _merges(problem: Problem, draft: Draft) -> Iterator[Move]:
    for first, (launch, following) in enumerate(itertools.pairwise(draft)):
        if len(launch) == len(following) == 1:
            (one,), (other,) = launch, following
            if problem.dtype(one.tensors[0]) == problem.dtype(other.tensors[0]):
                for option in dict.fromkeys((one.option, other.option)):
                    yield Move(first, first + 2, ((MessageDraft(one.tensors + other.tensors, option),),))


def _splits(draft: Draft) -> Iterator[Move]:
    for first, launch in enumerate(draft):
        if len(launch) == 1 and len(launch[0].tensors) > 1:
            (message,) = launch
            count = len(message.tensors)
            for cut in sorted({count * number // (_CUTS + 1) for number in range(1, _CUTS + 1)} - {0}):
                parts = (message.tensors[:cut], message.tensors[cut:])
                yield Move(first, first + 1, tuple((MessageDraft(part, message.option),) for part in parts))


def orders_of(problem: Problem, draft: Draft) -> list[Move]:
    """Moves that launch one of the last launches earlier or later. DDP's launches have one order."""
    if not problem.frontend.plans_launches:
        return []
    last = len(draft)
    moves = []
    for first in range(max(0, last - _LATE), last):
        for stop in range(first + 2, last + 1):
            earlier = (draft[stop - 1], *draft[first : stop - 1])
            later = (*draft[first + 1 : stop], draft[first])
            moves += [Move(first, stop, each) for each in dict.fromkeys((earlier, later))]
    return moves


def _partings(problem: Problem, draft: Draft) -> Iterator[Move]:
    """Moves that send tensors of a launch in place, apart from the others, or all of them in one message."""
    tensors = problem.trace.tensors
    for first, launch in enumerate(draft):
        largest = max(launch, key=lambda message: sum(tensors[tensor].numel for tensor in message.tensors))
        if len(launch) > 1:
            everything = tuple(tensor for message in launch for tensor in message.tensors)
            if problem.buckets:
                everything = problem.buckets[first]
            yield Move(first, first + 1, ((MessageDraft(everything, largest.option),),))
            continue
        option = largest.option
        if option.compressor is None:
            continue
        may_use = problem.users[option.compressor] & set(largest.tensors)
        size = max((tensors[tensor].numel for tensor in may_use), default=0) // _SMALL
        for kept in dict.fromkeys(
            (frozenset(may_use), frozenset(each for each in may_use if tensors[each].numel > size))
        ):
            apart = tuple(tensor for tensor in largest.tensors if tensor not in kept)
            rest = tuple(tensor for tensor in largest.tensors if tensor in kept)
            if apart and rest:
                yield Move(first, first + 1, ((MessageDraft(apart, Option()), MessageDraft(rest, option)),))


def disjoint(moves: list[Move]) -> list[Move]:
    """The moves that touch no launch of an earlier one in the list, nor its neighbours."""
    taken: set[int] = set()
    chosen = []
    for move in moves:
        touched = set(range(move.first - 1, move.stop + 1))
        if not touched & taken:
            taken |= set(range(move.first, move.stop))
            chosen.append(move)
    return chosen


def after(draft: Draft, move: Move, origin: Draft) -> Draft | None:
    """A draft after a move of another one; ``None`` if it no longer has the launches that the move replaces.

    Args:
        origin: the draft that the move is for.
    """
    old = origin[move.first : move.stop]
    for first in range(len(draft) - len(old) + 1):
        if draft[first] == old[0]:
            fits = draft[first : first + len(old)] == old
            return (*draft[:first], *move.launches, *draft[first + len(old) :]) if fits else None
    return None


def moved(draft: Draft, moves: list[Move]) -> Draft:
    """A draft after moves that touch different launches."""
    launches = list(draft)
    for move in sorted(moves, key=lambda each: -each.first):
        launches[move.first : move.stop] = move.launches
    return tuple(launches)
