"""Arrays of rows: forms of options, prices as columns, and the joining of options into one table."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...programs.lanes import IN_FLIGHT
from ...programs.stages import StageSpec
from ..machines.machine import Floats, MachineError, Price, Shared
from .maxplus import BACKWARD, FAR_S, FINISH, NOWHERE, UNUSABLE_S, Ints, Rows

Bools: TypeAlias = npt.NDArray[np.bool_]
_HEAD, _TAIL = 9, 3
"""Stages of a ring that wait for their lanes, at its start and at its end."""
_WIDTH = 1 + _HEAD + 1 + _TAIL + 1
"""The columns of a form: submission, the stages of the longest one, the end of its launch."""


class StageColumn(NamedTuple):
    """A stage of a form.

    Attributes:
        spec: its specification; ``None`` if it waits for no lane.
        needs: the numbers of its needs, which are met one after the other.
        is_elsewhere: whether other ranks do the work. Their links may be those of this rank.
    """

    spec: StageSpec | None
    needs: tuple[int, ...]
    is_elsewhere: bool


def shortened(stages: list[StageColumn]) -> list[StageColumn]:
    """The stages without the middle of a long ring, in whose place is one stage that waits for no lane."""
    if len(stages) <= _HEAD + _TAIL:
        return stages
    middle = tuple(need for stage in stages[_HEAD:-_TAIL] for need in stage.needs)
    return [*stages[:_HEAD], StageColumn(None, middle, False), *stages[-_TAIL:]]


class Form(NamedTuple):
    """The stages of an option, whatever its messages.

    The first column is the submission, and the last one of an option that has one is the end of its launch.

    Attributes:
        works: for each stage its needs, and whether other ranks do the work.
        lanes: ``[channels, columns]``, the lane of each stage for each channel of the message.
        leads: ``[columns]``, whether a stage has a lead.
        waits: ``[columns]``, whether it waits for its lane.
    """

    works: tuple[tuple[tuple[int, ...], bool], ...]
    lanes: Ints
    leads: Bools
    waits: Bools

    @staticmethod
    def of(stages: Sequence[StageColumn], routes: Sequence[Sequence[tuple[int, bool, bool]]], ends: bool) -> Form:
        """The form of some stages.

        Args:
            stages: the stages.
            routes: for each channel and stage the lane, whether there is a lead, and whether the stage waits.
            ends: whether a lane waits for the end of the launch.
        """
        lanes = np.full((len(routes), _WIDTH), NOWHERE, dtype=np.intp)
        leads, waits = np.zeros(_WIDTH, dtype=bool), np.ones(_WIDTH, dtype=bool)
        lanes[:, 0] = BACKWARD
        for channel, route in enumerate(routes):
            for column, (lane, leading, waiting) in enumerate(route, 1):
                lanes[channel, column], leads[column], waits[column] = lane, leading, waiting
        if ends:
            lanes[:, len(stages) + 1] = FINISH
        return Form(tuple((stage.needs, stage.is_elsewhere) for stage in stages), lanes, leads, waits)


@dataclass(frozen=True)
class FormTable:
    """The forms of several options.

    Attributes:
        lanes: ``[chains, options, columns]``, the lane of each stage.
        leads, waits: ``[options, columns]``, as in :class:`Form`.
        work: ``[options, columns]``, the number of each stage's work; -1 for none.
        works: all distinct works, as in :class:`Form`.
    """

    lanes: Ints
    leads: Bools
    waits: Bools
    work: Ints
    works: Sequence[tuple[tuple[int, ...], bool]]

    @staticmethod
    def of(forms: Sequence[Form], channels: Sequence[int], chains: int) -> FormTable:
        """The table of some options.

        Args:
            forms: their forms.
            channels: the channel of the first message of each.
            chains: the number of messages of each, on one channel after the other.
        """
        width = 2 + max(len(form.works) for form in forms)
        numbers: dict[tuple[tuple[int, ...], bool], int] = {}
        work = np.full((len(forms), width), -1, dtype=np.intp)
        for option, form in enumerate(forms):
            for column, each in enumerate(form.works, 1):
                work[option, column] = numbers.setdefault(each, len(numbers))
        of_channel = np.stack([form.lanes for form in forms])[:, :, :width]
        first, options = np.array(channels), np.arange(len(forms))
        lanes = np.stack([of_channel[options, (first + chain) % of_channel.shape[1]] for chain in range(chains)])
        leads, waits = (np.stack([form[at] for form in forms])[:, :width] for at in (2, 3))
        return FormTable(lanes, leads, waits, work, list(numbers))

    @functools.cached_property
    def needs(self) -> list[int]:
        """The numbers of all needs."""
        return list(dict.fromkeys(need for needs, _ in self.works for need in needs))


class PriceColumns:
    """Prices of needs in messages, as columns.

    Args:
        needs: the numbers of the needs.
        messages: the number of messages.
        resources: the resources of limited capacity.
        capacities: their capacities.

    Attributes:
        alone_s: ``[needs, messages]``, seconds alone.
        loaded_s: ``[needs, messages]``, those of them in which resources are loaded.
        work_s: ``[needs, messages, resources]``, the work of each resource over its capacity.
        submit_s: ``[needs]``, seconds of the submitting thread.
        missing: ``[needs]``, whether the machine lacks a price.
    """

    def __init__(self, needs: Sequence[int], messages: int, resources: Sequence[Shared], capacities: Floats) -> None:
        self.row = {need: row for row, need in enumerate(needs)}
        self._resources, self._capacities = resources, capacities
        self.alone_s, self.loaded_s = np.zeros((len(needs), messages)), np.zeros((len(needs), messages))
        self.work_s = np.zeros((len(needs), messages, len(resources)))
        self.submit_s, self.missing = np.zeros(len(needs)), np.zeros(len(needs), dtype=bool)

    def add(self, members: Sequence[int], prices: Mapping[int, Price | MachineError]) -> None:
        """Note the prices of needs in some of the messages."""
        everything = len(members) == self.alone_s.shape[1]
        at = slice(None) if everything else list(members)
        for need, price in prices.items():
            row = self.row[need]
            if isinstance(price, MachineError):
                self.missing[row] = True
                continue
            self.submit_s[row], self.alone_s[row, at] = price.submit_s, price.alone_s
            others = [work for shared, work in price.work_s.items() if shared != Shared.CORES]
            loads = [np.max(others, axis=0) if len(others) > 1 else others[0]] if others else []
            if Shared.CORES in price.work_s:
                cores = price.work_s[Shared.CORES]
                loads = [np.where(loads[0] > 0, loads[0], cores)] if loads else [cores]
            if loads:
                self.loaded_s[row, at] = np.minimum(price.alone_s, loads[0])
            for shared, work in price.work_s.items():
                if shared in self._resources:
                    which = self._resources.index(shared)
                    self.work_s[row, at, which] = work / self._capacities[which]

    def of_works(self, works: Sequence[tuple[tuple[int, ...], bool]]) -> tuple[Floats, Floats, Floats, Floats, Bools]:
        """The columns of works: seconds alone, loaded seconds, work, submission, and which lack a price. The last row
        is that of no work."""
        counts = np.zeros((len(works) + 1, len(self.row)))
        for number, (needs, _) in enumerate(works):
            for need in needs:
                counts[number, self.row[need]] += 1.0
        here = np.array([[0.0 if elsewhere else 1.0] for _, elsewhere in works] + [[1.0]])
        mine = counts * here
        links = np.array([shared.is_link for shared in self._resources], dtype=bool)
        all_work_s, work_s = (np.tensordot(each, self.work_s, axes=1) for each in (counts, mine))
        middle = np.array([[0.0 if elsewhere or len(needs) > 1 else 1.0] for needs, elsewhere in works] + [[1.0]])
        return (
            counts @ self.alone_s,
            (counts * middle) @ self.loaded_s,
            np.where(links, all_work_s, work_s),
            mine @ self.submit_s,
            (counts @ self.missing) > 0,
        )


def filled(table: FormTable, prices: PriceColumns, column: Ints, usable: Bools) -> TablePiece:
    """The arrays of a family.

    Args:
        table: the forms of its options.
        prices: the prices of all their needs.
        column: ``[items, chains]``, the message of each chain; -1 for none.
        usable: ``[items]``, whether an item may use the compressor.
    """
    chains, lanes, number = column.shape[1], table.lanes, table.work
    alone_s, loaded_s, work_s, submit_of, missing = prices.of_works(table.works)
    submit_s = submit_of[number]
    first_s, rest_s = submit_s[:, 1], submit_s[:, 2:].sum(axis=1)
    alone = alone_s.T[:, number]  # [messages, options, stages]
    alone[:, :, 0] = first_s
    after = alone.cumsum(axis=2)
    before = after - alone
    if table.leads.any():
        before += np.where(table.leads, alone - loaded_s.T[:, number], 0.0)
    before[:, ~table.waits] = FAR_S
    after += np.where(lanes[0] == BACKWARD, rest_s[:, None], 0.0)
    used = np.zeros((len(number), len(work_s)))
    np.add.at(used, (np.arange(len(number))[:, None], number), 1.0)
    work = np.moveaxis(np.tensordot(used, work_s, axes=1), 1, 0)  # [messages, options, resources]
    flying = [
        {
            lane: np.where(table.leads & (of_chain == lane), alone, 0.0).sum(axis=2) / IN_FLIGHT
            for lane in np.unique(of_chain[table.leads]).tolist()
        }
        for of_chain in lanes
    ]
    piece = TablePiece(
        lanes,
        at_columns(before, column, FAR_S),
        at_columns(after, column, 0.0),
        np.repeat(first_s[None], chains, axis=0),
        at_columns(work, column, 0.0).sum(axis=1),
        {},
    )
    for chain, of_lane in enumerate(flying):
        for lane, seconds in of_lane.items():
            piece.flying.setdefault(lane, np.zeros(piece.work_s.shape[:2]))
            piece.flying[lane] += at_columns(seconds, column[:, chain], 0.0)
    unusable = ~usable[:, None] | missing[number].any(axis=1)
    piece.after_s[:, 0, :, 0] = np.where(unusable, UNUSABLE_S, piece.after_s[:, 0, :, 0])
    return piece


@dataclass(frozen=True)
class TablePiece:
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


def at_columns(values: Floats, column: Ints, otherwise: float) -> Floats:
    """``values[column]``, or ``otherwise`` where the column is -1."""
    if column.shape == (len(values), 1) and np.array_equal(column[:, 0], np.arange(len(values))):
        return values[:, None]
    found: Floats = values[column]
    found[column < 0] = otherwise
    return found


def joined(pieces: Sequence[TablePiece], places: Sequence[Sequence[int]], size: int) -> Rows:
    """The rows of all families.

    Args:
        pieces: the arrays of each family.
        places: for each of them, the places of its options in the rows.
        size: the number of lanes.
    """
    width = max(piece.lanes.shape[2] for piece in pieces)
    chains = max(len(piece.lanes) for piece in pieces)
    flying = sorted({lane for piece in pieces for lane in piece.flying})
    kinds, options, resources = len(pieces[0].work_s), sum(map(len, places)), pieces[0].work_s.shape[2]
    lanes = np.full((chains, options, width), NOWHERE, dtype=np.intp)
    lanes[:, :, 0] = BACKWARD
    before, after = np.full((kinds, chains, options, width), FAR_S), np.zeros((kinds, chains, options, width))
    first, work = np.zeros((chains, options)), np.zeros((kinds, options, resources + len(flying)))
    several = np.zeros(options, dtype=bool)
    for piece, at in zip(pieces, places, strict=True):
        for chain, of_chain in enumerate(piece.lanes):
            stages = of_chain.shape[1]
            lanes[chain, at, :stages] = of_chain
            for table, given in ((before, piece.before_s), (after, piece.after_s)):
                table[:, chain, at, :stages] = given[:, chain]
                table[:, chain, at, stages:] = given[:, chain, :, -1:]
            first[chain, at] = piece.first_s[chain]
        work[:, at, :resources] = piece.work_s
        for lane, seconds in piece.flying.items():
            work[:, at, resources + flying.index(lane)] = seconds
        several[at] = len(piece.lanes) > 1
    return Rows(lanes, before, after, first, work, np.flatnonzero(several), size)
