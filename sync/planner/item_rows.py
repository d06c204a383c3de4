"""Rows of items: the stages of every option of every item, priced, for :mod:`~.maxplus`.

An item is a message of a draft. Items whose tensors have the same sizes, shapes, dtypes and compressors are of the same
kind, and are priced once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gckernels.compressor import Compressor
from gckernels.method import Method
from gckernels.ops import Identity

from ..programs.lanes import lane_key
from ..programs.stages import MessageKind, Resource
from ..programs.steps import AllReduce, Program
from .drafts import MAX_CHANNELS, Option, cut
from .machine import Floats, MachineError, Price, Shared
from .maxplus import BACKWARD, FAR_S, FINISH, FIRST_LANE, NOWHERE, SINK, UNUSABLE_S, Gaps, Ints, Rows
from .pricing import PricedStage, Units
from .problem import Problem

Item: TypeAlias = tuple[int, ...]
"""The tensors of a message."""
Bools: TypeAlias = npt.NDArray[np.bool_]
IN_FLIGHT = 2
"""Collectives of a lane of the host that may be on their way at the same time."""
_Message: TypeAlias = list[tuple[Method, int]]
"""The fitted methods and the sizes of the units of a message."""


@dataclass(frozen=True)
class _Family:
    """Options whose messages have the same units.

    Attributes:
        kind: the kind of their messages.
        compressor: the compressor.
        sums: whether a collective sums payloads, so that units of different payload dtypes are different messages.
        parts: the number of parts.
    """

    kind: MessageKind
    compressor: Method | None
    sums: bool
    parts: int


class RowMaker:
    """Makes rows for items of a problem.

    Args:
        problem: the problem.
        sharing: whether stages that compute before anything is sent delay backward, as they do where backward takes
            all of the resource. The times are then no lower bounds, but closer to the truth.

    Attributes:
        resources: the resources of limited capacity, which have work lanes.
    """

    def __init__(self, problem: Problem, sharing: bool = True) -> None:
        self._problem, machine = problem, problem.machine
        self._on_host = machine.computes_on == Shared.CORES
        capacities = machine.capacities
        self._delays_backward = sharing and capacities.get(machine.computes_on, np.inf) <= 1.0
        self.resources = [shared for shared in Shared if capacities.get(shared, np.inf) < np.inf]
        self._capacities = np.array([capacities[shared] for shared in self.resources])
        self._lanes: dict[Hashable, int] = {}
        for phase in range(8):  # one of them waits for launches
            self._lane(lane_key(Resource.COMPUTE, phase))
        classes: dict[object, int] = {}
        allowed = problem.allowed
        self._classes = [
            classes.setdefault((each.numel, each.shape, each.dtype, allowed.get(each.name, ())), len(classes))
            for each in problem.trace.tensors
        ]

    def lane_of_phase(self, phases: int) -> int:
        """The lane that waits for launches of a plan whose longest program has ``phases`` collectives."""
        return self._lanes[lane_key(Resource.COMPUTE, phases)]

    def kinds(self, items: Sequence[Item]) -> tuple[list[int], list[Item]]:
        """The kind of each item, and an item of every kind."""
        numbers: dict[tuple[int, ...], int] = {}
        first: list[Item] = []
        kinds = []
        for item in items:
            key = tuple(self._classes[tensor] for tensor in item)
            if key not in numbers:
                numbers[key] = len(numbers)
                first.append(item)
            kinds.append(numbers[key])
        return kinds, first

    def rows(self, items: Sequence[Item], options: Sequence[Option]) -> Rows:
        """The rows of options for items, each a kind of its own.

        An option that an item may not use, or for which the machine lacks a price, takes infinitely long.
        """
        families: dict[_Family, list[int]] = {}
        for index, option in enumerate(options):
            families.setdefault(_family(option), []).append(index)
        pieces = [self._piece(family, items, [options[at] for at in members]) for family, members in families.items()]
        order = [at for members in families.values() for at in members]
        return _joined(pieces, order, len(self._lanes) + FIRST_LANE)

    def gaps(self, computing_s: Floats, firsts: Bools, rows: Rows) -> Gaps:
        """The time that passes between items.

        Args:
            computing_s: ``[items + 1]``, the seconds of backward before each item, and behind the last one.
            firsts: ``[items + 1]``, which of the items are the first ones of launches.
            rows: the rows of the items.
        """
        machine = self._problem.machine
        hooks_s = np.where(firsts, machine.overheads.hook_s, 0.0)
        work_s = np.zeros((len(computing_s), rows.work_s.shape[2]))
        if machine.computes_on in self.resources:
            at = self.resources.index(machine.computes_on)
            share = min(1.0, self._capacities[at]) / self._capacities[at]
            work_s[:, at] = share * (computing_s + (hooks_s if self._on_host else 0.0))
        return Gaps(computing_s + hooks_s, work_s)

    # ---------------------------------------------------------------- one family

    def _piece(self, family: _Family, items: Sequence[Item], options: Sequence[Option]) -> _Piece:
        messages = [self._messages(family, item) for item in items]
        usable = np.array([any(self._uses(family, tensor) for tensor in item) for item in items])
        chains = max(map(len, messages))
        column = np.full((len(items), chains), -1, dtype=np.intp)
        flat: list[_Message] = []
        for number, each in enumerate(messages):
            column[number, : len(each)] = range(len(flat), len(flat) + len(each))
            flat += each
        dtypes = [self._problem.dtype(item[0]) for item in items]
        dtype_of = [dtype for dtype, each in zip(dtypes, messages, strict=True) for _ in each]
        rows = self._priced(family.kind, [option.program for option in options], flat, dtype_of)
        return self._filled(options, rows, column, usable)

    def _uses(self, family: _Family, tensor: int) -> bool:
        """Whether a tensor may use the compressor of a family."""
        problem = self._problem
        if family.kind == MessageKind.IN_PLACE:
            return True
        allowed = problem.allowed.get(problem.trace.tensors[tensor].name, ())
        return problem.encodable(tensor) and family.compressor in (None, *allowed)

    def _messages(self, family: _Family, item: Item) -> list[_Message]:
        """The messages of an item, in the order of their submission."""
        problem = self._problem
        messages: dict[object, _Message] = {}
        for tensor in item:
            method, numel = problem.fitted(tensor, family.compressor), problem.trace.tensors[tensor].numel
            pieces = cut(numel, family.parts) if isinstance(method, Compressor) else ((0, numel),)
            dtype = method.traits.payload_dtype if family.sums else None
            for part, (_, size) in enumerate(pieces):
                messages.setdefault((part, dtype), []).append((method, size))
        return list(messages.values())

    def _priced(
        self, kind: MessageKind, programs: Sequence[Program], messages: list[_Message], dtypes: list[torch.dtype]
    ) -> list[tuple[PricedStage, ...]]:
        """For each program its stages, with prices for all messages; none if the machine lacks a price."""
        if len(set(dtypes)) == 1:
            return self._table(kind, programs, _units(messages), dtypes[0])
        per_dtype = []
        for dtype in dict.fromkeys(dtypes):
            members = [index for index, other in enumerate(dtypes) if other == dtype]
            rows = self._table(kind, programs, _units([messages[index] for index in members]), dtype)
            per_dtype.append((np.array(members), rows))
        return [
            _merged([(members, rows[index]) for members, rows in per_dtype], len(messages))
            for index in range(len(programs))
        ]

    def _table(
        self, kind: MessageKind, programs: Sequence[Program], units: Sequence[Units], dtype: torch.dtype
    ) -> list[tuple[PricedStage, ...]]:
        try:
            return self._problem.pricer.table(kind, programs, units, dtype)
        except MachineError:
            if len(programs) == 1:
                return [()]
            half = len(programs) // 2
            return self._table(kind, programs[:half], units, dtype) + self._table(kind, programs[half:], units, dtype)

    # ---------------------------------------------------------------- arrays

    def _filled(
        self, options: Sequence[Option], rows: list[tuple[PricedStage, ...]], column: Ints, usable: Bools
    ) -> _Piece:
        """The arrays of a family.

        Args:
            options: its options.
            rows: their stages, with prices for all messages.
            column: ``[items, chains]``, the message of each chain; -1 for none.
            usable: ``[items]``, whether an item may use the compressor.
        """
        chains, shape = column.shape[1], (len(options), 2 + max((len(row) for row in rows), default=0))
        lanes = np.full((chains, *shape), NOWHERE, dtype=np.intp)
        lanes[:, :, 0] = BACKWARD
        prices: dict[int, int] = {}
        distinct: list[Price] = []
        number, submit_s = np.full(shape, -1, dtype=np.intp), np.zeros(shape)
        waits, leads = np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for at, (option, row) in enumerate(zip(options, rows, strict=True)):
            for place, stage in enumerate(row, 1):
                if id(stage.price) not in prices:
                    prices[id(stage.price)] = len(distinct)
                    distinct.append(stage.price)
                number[at, place] = prices[id(stage.price)]
                submit_s[at, place] = stage.price.submit_s
                for chain in range(chains):
                    channel = (option.channel + chain) % MAX_CHANNELS
                    lanes[chain, at, place], leads[at, place], waits[at, place] = self._route(stage, channel)
            if not option.in_place:
                lanes[:, at, len(row) + 1] = FINISH
        messages = 1 + int(column.max())
        alone_s, loaded_s, work_s = self._columns(distinct, messages)
        first_s, rest_s = submit_s[:, 1], submit_s[:, 2:].sum(axis=1)
        alone = np.moveaxis(alone_s[number], 2, 0)  # [messages, options, stages]
        lead = np.where(leads, alone - np.moveaxis(loaded_s[number], 2, 0), 0.0)
        alone[:, :, 0] = first_s
        ends = alone.cumsum(axis=2)
        before = np.where(waits, ends - alone + lead, FAR_S)
        after = ends + np.where(lanes[0] == BACKWARD, rest_s[:, None], 0.0)
        used = np.zeros((len(options), len(distinct) + 1))
        np.add.at(used, (np.arange(len(options))[:, None], number), 1.0)
        work = np.moveaxis(np.tensordot(used, work_s, axes=1), 1, 0)  # [messages, options, resources]
        flying = [
            {
                lane: np.where(leads & (of_chain == lane), alone, 0.0).sum(axis=2) / IN_FLIGHT
                for lane in np.unique(of_chain[leads]).tolist()
            }
            for of_chain in lanes
        ]
        piece = _Piece(
            lanes,
            _at(before, column, FAR_S),
            _at(after, column, 0.0),
            np.repeat(first_s[None], chains, axis=0),
            _at(work, column, 0.0).sum(axis=1),
            {},
        )
        for chain, of_lane in enumerate(flying):
            for lane, seconds in of_lane.items():
                piece.flying.setdefault(lane, np.zeros(piece.work_s.shape[:2]))
                piece.flying[lane] += _at(seconds, column[:, chain], 0.0)
        unusable = ~usable[:, None] | np.array([not row for row in rows])
        piece.after_s[:, 0, :, 0] = np.where(unusable, UNUSABLE_S, piece.after_s[:, 0, :, 0])
        return piece

    def _columns(self, prices: Sequence[Price], messages: int) -> tuple[Floats, Floats, Floats]:
        """The seconds alone, those in which resources are loaded, and the work of each resource, of prices.

        The last row is zero.
        """
        alone_s, loaded_s = np.zeros((len(prices) + 1, messages)), np.zeros((len(prices) + 1, messages))
        work_s = np.zeros((len(prices) + 1, messages, len(self.resources)))
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
                if shared in self.resources:
                    work_s[number, :, self.resources.index(shared)] = work
        return alone_s, loaded_s, work_s / self._capacities

    def _route(self, stage: PricedStage, channel: int) -> tuple[int, bool, bool]:
        """The lane of a stage; whether it has a lead; whether it waits for the lane."""
        spec = stage.spec
        if self._delays_backward and spec.resource == Resource.COMPUTE and spec.phase == 0:
            return BACKWARD, False, True
        key = stage.lane(channel)
        if spec.starts_immediately:
            return (SINK, True, False) if self._on_host else (self._lane(("at once", key)), False, True)
        overlaps = key.resource == Resource.HOST_COMMUNICATE
        return self._lane(key), overlaps or (self._on_host and key.resource == Resource.COMMUNICATE), True

    def _lane(self, key: Hashable) -> int:
        return self._lanes.setdefault(key, FIRST_LANE + len(self._lanes))


@dataclass(frozen=True)
class _Piece:
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


def _family(option: Option) -> _Family:
    if option.in_place:
        return _Family(MessageKind.IN_PLACE, None, False, 1)
    low_rank = option.compressor is not None and not isinstance(option.compressor, Compressor)
    kind = MessageKind.LOW_RANK if low_rank else MessageKind.ENCODED
    sums = any(isinstance(step, AllReduce) for step in option.program)
    return _Family(kind, option.compressor, sums, 1 if low_rank else option.parts)


def _at(values: Floats, column: Ints, otherwise: float) -> Floats:
    """``values[column]``, or ``otherwise`` where the column is -1."""
    found: Floats = values[column]
    found[column < 0] = otherwise
    return found


def _units(messages: list[_Message]) -> list[Units]:
    """The units of messages by their methods; first those that decide the stages."""
    methods = dict.fromkeys(method for message in messages for method, _ in message)
    ordered = sorted(methods, key=lambda method: isinstance(method, Identity))
    return [Units.of(method, [[size for by, size in each if by == method] for each in messages]) for method in ordered]


def _merged(rows: list[tuple[Ints, tuple[PricedStage, ...]]], messages: int) -> tuple[PricedStage, ...]:
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


def _joined(pieces: Sequence[_Piece], order: Sequence[int], size: int) -> Rows:
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
