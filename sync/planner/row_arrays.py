"""Arrays of rows: prices as columns, and the joining of options with different messages into one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..programs.lanes import MAX_PHASES
from ..programs.stages import Resource, StageKind, StageSpec
from .machine import Floats, Price, Shared
from .maxplus import BACKWARD, FAR_S, NOWHERE, Ints, Rows
from .pricing import PricedStage

_HEAD, _TAIL = 9, 3
"""Stages of a ring that wait for their lanes, at its start and at its end."""
MIDDLE = StageSpec(StageKind.COLLECTIVE, "middle of a ring", MAX_PHASES, Resource.COMMUNICATE, 0, 0)


@dataclass(frozen=True)
class Piece:
    """The arrays of one family, as in :class:`~.maxplus.Rows`.

    Attributes:
        flying: by lane, ``[items, options]``: half the seconds of collectives that may overlap with one other.
    """

    lanes: Ints
    before_s: Floats
    after_s: Floats
    first_s: Floats
    work_s: Floats
    flying: dict[int, Floats]


def price_columns(
    prices: Sequence[Price], messages: int, resources: Sequence[Shared], capacities: Floats
) -> tuple[Floats, Floats, Floats]:
    """The seconds alone, those in which resources are loaded, and the work of each resource, of prices.

    The last row is zero.

    Args:
        prices: the prices, each for all messages.
        messages: the number of messages.
        resources: the resources of limited capacity.
        capacities: their capacities.
    """
    alone_s, loaded_s = np.zeros((len(prices) + 1, messages)), np.zeros((len(prices) + 1, messages))
    work_s = np.zeros((len(prices) + 1, messages, len(resources)))
    for number, price in enumerate(prices):
        alone_s[number] = price.alone_s
        others = [work for shared, work in price.work_s.items() if shared != Shared.CORES]
        loads = [np.max(others, axis=0)] if others else []
        if Shared.CORES in price.work_s:
            cores = price.work_s[Shared.CORES]
            loads = [np.where(loads[0] > 0, loads[0], cores)] if loads else [cores]
        if loads:
            loaded_s[number] = np.minimum(price.alone_s, loads[0])
        for shared, work in price.work_s.items():
            if shared in resources:
                work_s[number, :, resources.index(shared)] = work
    return alone_s, loaded_s, work_s / capacities


def shortened(row: tuple[PricedStage, ...]) -> tuple[PricedStage, ...]:
    """A row without the middle of a long ring, in whose place is one stage that waits for no lane."""
    if len(row) <= _HEAD + _TAIL:
        return row
    middle = [stage.price for stage in row[_HEAD:-_TAIL]]
    work_s = {
        shared: np.sum([price.work_s[shared] for price in middle if shared in price.work_s], axis=0)
        for shared in {shared for price in middle for shared in price.work_s}
    }
    alone_s = np.sum([price.alone_s for price in middle], axis=0)
    whole = PricedStage(MIDDLE, Price(alone_s, work_s, sum(price.submit_s for price in middle)))
    return (*row[:_HEAD], whole, *row[-_TAIL:])


def at_columns(values: Floats, column: Ints, otherwise: float) -> Floats:
    """``values[column]``, or ``otherwise`` where the column is -1."""
    found: Floats = values[column]
    found[column < 0] = otherwise
    return found


def merged(rows: list[tuple[Ints, tuple[PricedStage, ...]]], messages: int) -> tuple[PricedStage, ...]:
    """The stages with prices for all messages, from prices for some of them."""
    if not all(stages for _, stages in rows):
        return ()
    merged = []
    for stages in zip(*(stages for _, stages in rows), strict=True):
        alone_s = np.zeros(messages)
        work_s = {shared: np.zeros(messages) for stage in stages for shared in stage.price.work_s}
        for (members, _), stage in zip(rows, stages, strict=True):
            alone_s[members] = stage.price.alone_s
            for shared, work in stage.price.work_s.items():
                work_s[shared][members] = work
        merged.append(PricedStage(stages[0].spec, Price(alone_s, work_s, stages[0].price.submit_s)))
    return tuple(merged)


def joined(pieces: Sequence[Piece], order: Sequence[int], size: int) -> Rows:
    """The rows of all families, with options in their given order."""
    width = max(piece.lanes.shape[2] for piece in pieces)
    chains = max(len(piece.lanes) for piece in pieces)
    flying = sorted({lane for piece in pieces for lane in piece.flying})
    columns: list[tuple[Ints, Floats, Floats, Floats, Floats]] = []
    several: list[int] = []
    for piece in pieces:
        more = (chains - len(piece.lanes), width - piece.lanes.shape[2])
        lanes = np.pad(piece.lanes, ((0, more[0]), (0, 0), (0, more[1])), constant_values=NOWHERE)
        lanes[len(piece.lanes) :, :, 0] = BACKWARD
        longer = ((0, 0), (0, 0), (0, 0), (0, more[1]))
        further = ((0, 0), (0, more[0]), (0, 0), (0, 0))
        before = np.pad(np.pad(piece.before_s, longer, mode="edge"), further, constant_values=FAR_S)
        after = np.pad(np.pad(piece.after_s, longer, mode="edge"), further)
        first = np.pad(piece.first_s, ((0, more[0]), (0, 0)))
        extra = [piece.flying.get(lane, np.zeros(piece.work_s.shape[:2])) for lane in flying]
        work = np.concatenate([piece.work_s, *(each[..., None] for each in extra)], axis=2)
        columns.append((lanes, before, after, first, work))
        several += [len(piece.lanes) > 1] * piece.lanes.shape[1]
    back = np.argsort(order)
    lanes, before, after, first, work = (
        np.concatenate(each, axis=axis)[(slice(None),) * axis + (back,)]
        for each, axis in zip(zip(*columns, strict=True), (1, 2, 2, 1, 1), strict=True)
    )
    return Rows(lanes, before, after, first, work, np.flatnonzero(np.array(several)[back]), size)
