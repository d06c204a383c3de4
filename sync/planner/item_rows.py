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

from ..programs.lanes import IN_FLIGHT, lane_key
from ..programs.layouts import Capabilities, propagate
from ..programs.stages import MessageKind, Resource, takes_part
from ..programs.steps import AllReduce, Broadcast, Gather, Program, Reduce
from .drafts import MAX_CHANNELS, Option, cut
from .machine import Floats, MachineError, Price, Shared
from .maxplus import BACKWARD, FAR_S, FINISH, FIRST_LANE, NOWHERE, SINK, UNUSABLE_S, Gaps, Ints, Rows
from .pricing import PricedStage, Units
from .problem import Problem
from .row_arrays import MIDDLE, Piece, at_columns, joined, merged, price_columns, shortened

Item: TypeAlias = tuple[int, ...]
"""The tensors of a message."""
Bools: TypeAlias = npt.NDArray[np.bool_]
_Unit: TypeAlias = tuple[int, int]
"""The number of a fitted method, and a size."""
_Message: TypeAlias = dict[_Unit, int]
"""The number of equal units in a message."""


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
        self._methods: dict[Method, int] = {}
        self._pieces: dict[_Family, dict[int, list[tuple[object, _Unit]]]] = {}  # by class of tensors
        self._parts: dict[tuple[Program, Method | None], tuple[bool, ...]] = {}
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
        return joined(pieces, order, len(self._lanes) + FIRST_LANE)

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

    def _piece(self, family: _Family, items: Sequence[Item], options: Sequence[Option]) -> Piece:
        messages = [self._messages(family, item) for item in items]
        users = self._users(family)
        usable = np.array([not users.isdisjoint(item) for item in items])
        chains = max(map(len, messages))
        column = np.full((len(items), chains), -1, dtype=np.intp)
        flat: list[_Message] = []
        for number, each in enumerate(messages):
            column[number, : len(each)] = range(len(flat), len(flat) + len(each))
            flat += each
        dtypes = [self._problem.dtype(item[0]) for item in items]
        dtype_of = [dtype for dtype, each in zip(dtypes, messages, strict=True) for _ in each]
        rows = self._priced(family.kind, [option.program for option in options], flat, dtype_of)
        rows = [
            shortened(row if option.root is not None else self._beside_root(option, row))
            for option, row in zip(options, rows, strict=True)
        ]
        return self._filled(options, rows, column, usable)

    def _users(self, family: _Family) -> frozenset[int]:
        """The tensors for which a family is an option."""
        tensors = frozenset(range(len(self._classes)))
        if family.kind == MessageKind.IN_PLACE:
            return tensors
        return self._problem.users[family.compressor]

    def _messages(self, family: _Family, item: Item) -> list[_Message]:
        """The messages of an item, in the order of their submission."""
        known = self._pieces.setdefault(family, {})
        messages: dict[object, _Message] = {}
        for tensor in item:
            number = self._classes[tensor]
            if number not in known:
                known[number] = self._cut(family, tensor)
            for key, unit in known[number]:
                message = messages.setdefault(key, {})
                message[unit] = message.get(unit, 0) + 1
        return list(messages.values())

    def _cut(self, family: _Family, tensor: int) -> list[tuple[object, _Unit]]:
        """The units of a tensor, with keys that are equal for those that share a message."""
        method, numel = self._problem.fitted(tensor, family.compressor), self._problem.trace.tensors[tensor].numel
        pieces = cut(numel, family.parts) if isinstance(method, Compressor) else ((0, numel),)
        dtype = method.traits.payload_dtype if family.sums else None
        number = self._methods.setdefault(method, len(self._methods))
        return [((part, dtype), (number, size)) for part, (_, size) in enumerate(pieces)]

    def _units(self, messages: list[_Message]) -> list[Units]:
        """The units of messages by their methods; first those that decide the stages."""
        numels: dict[int, dict[int, int]] = {}  # by method: the row of each size
        for number, size in dict.fromkeys(unit for message in messages for unit in message):
            rows = numels.setdefault(number, {})
            rows[size] = len(rows)
        counts = {number: np.zeros((len(rows), len(messages))) for number, rows in numels.items()}
        for column, message in enumerate(messages):
            for (number, size), count in message.items():
                counts[number][numels[number][size], column] = count
        methods = list(self._methods)
        ordered = sorted(numels, key=lambda number: isinstance(methods[number], Identity))
        return [Units(methods[number], tuple(numels[number]), counts[number]) for number in ordered]

    def _beside_root(self, option: Option, row: tuple[PricedStage, ...]) -> tuple[PricedStage, ...]:
        """The stages of a message of a program with a root, for a rank that is not the root: where it has no part, it
        waits. Most ranks are the roots of few messages if these have different roots."""
        if not row:  # the machine lacks a price
            return row
        key = (option.program, option.compressor)
        if key not in self._parts:
            self._parts[key] = self._has_part(option, row)
        if all(self._parts[key]):
            return row
        return tuple(
            stage if has_part else PricedStage(MIDDLE, Price(stage.price.alone_s))
            for stage, has_part in zip(row, self._parts[key], strict=True)
        )

    def _has_part(self, option: Option, row: tuple[PricedStage, ...]) -> tuple[bool, ...]:
        """Whether a rank on another machine than the root, and with another place on it, has a part in each stage."""
        if not any(isinstance(step, Gather | Reduce | Broadcast) for step in option.program):
            return (True,) * len(row)
        topology = self._problem.topology
        layouts = propagate(option.program, Capabilities.of(option.compressor or Identity()), topology)
        last = topology.world_size - 1
        return tuple(takes_part(stage.spec, option.program, layouts, topology, last, 0) for stage in row)

    def _priced(
        self, kind: MessageKind, programs: Sequence[Program], messages: list[_Message], dtypes: list[torch.dtype]
    ) -> list[tuple[PricedStage, ...]]:
        """For each program its stages, with prices for all messages; none if the machine lacks a price."""
        if len(set(dtypes)) == 1:
            return self._table(kind, programs, self._units(messages), dtypes[0])
        per_dtype = []
        for dtype in dict.fromkeys(dtypes):
            members = [index for index, other in enumerate(dtypes) if other == dtype]
            rows = self._table(kind, programs, self._units([messages[index] for index in members]), dtype)
            per_dtype.append((np.array(members), rows))
        return [
            merged([(members, rows[index]) for members, rows in per_dtype], len(messages))
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
    ) -> Piece:
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
                price = stage.price
                if id(price) not in prices:
                    prices[id(price)] = len(distinct)
                    distinct.append(price)
                number[at, place] = prices[id(price)]
                submit_s[at, place] = price.submit_s
                for chain in range(chains):
                    channel = (option.channel + chain) % MAX_CHANNELS
                    lanes[chain, at, place], leads[at, place], waits[at, place] = self._route(stage, channel)
            if not option.in_place:
                lanes[:, at, len(row) + 1] = FINISH
        messages = 1 + int(column.max())
        alone_s, loaded_s, work_s = price_columns(distinct, messages, self.resources, self._capacities)
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
        piece = Piece(
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
        unusable = ~usable[:, None] | np.array([not row for row in rows])
        piece.after_s[:, 0, :, 0] = np.where(unusable, UNUSABLE_S, piece.after_s[:, 0, :, 0])
        return piece

    def _route(self, stage: PricedStage, channel: int) -> tuple[int, bool, bool]:
        """The lane of a stage; whether it has a lead; whether it waits for the lane."""
        spec = stage.spec
        if spec is MIDDLE:
            return NOWHERE, False, False
        if self._delays_backward and spec.resource == Resource.COMPUTE and spec.phase == 0:
            return BACKWARD, False, True
        key = stage.lane(channel)
        if spec.starts_immediately:
            return (SINK, True, False) if self._on_host else (self._lane(("at once", key)), False, True)
        overlaps = key.resource == Resource.HOST_COMMUNICATE
        return self._lane(key), overlaps or (self._on_host and key.resource == Resource.COMMUNICATE), True

    def _lane(self, key: Hashable) -> int:
        return self._lanes.setdefault(key, FIRST_LANE + len(self._lanes))


def _family(option: Option) -> _Family:
    if option.in_place:
        return _Family(MessageKind.IN_PLACE, None, False, 1)
    low_rank = option.compressor is not None and not isinstance(option.compressor, Compressor)
    kind = MessageKind.LOW_RANK if low_rank else MessageKind.ENCODED
    sums = any(isinstance(step, AllReduce) for step in option.program)
    return _Family(kind, option.compressor, sums, 1 if low_rank else option.parts)
