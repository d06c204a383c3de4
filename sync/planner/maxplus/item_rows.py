"""Rows of items: the stages of every option of every item, priced, for :mod:`~.maxplus`.

An item is a message of a draft. Items whose tensors have the same sizes, shapes, dtypes and compressors are of the same
kind, and are priced once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ...programs.lanes import lane_key
from ...programs.stages import MessageKind, Resource, StageSpec
from ...programs.steps import AllReduce, Program
from ..drafts.drafts import MAX_CHANNELS, Option, cut
from ..drafts.problem import Problem
from ..machines.machine import Floats, Shared
from ..timeline.pricing import Units
from ..timeline.stage_templates import Skeletons
from .maxplus import BACKWARD, FIRST_LANE, NOWHERE, SINK, Gaps, Rows
from .option_table import Bools, Form, FormTable, PriceColumns, StageColumn, TablePiece, filled, joined, shortened

Item: TypeAlias = tuple[int, ...]
"""The tensors of a message."""
_Unit: TypeAlias = tuple[int, int]
"""The number of a fitted method, and a size."""
_Message: TypeAlias = dict[_Unit, int]
"""The number of equal units in a message."""
_KEPT_ITEMS = 2000
"""Items of a family whose messages are kept."""


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
    compressor: Compressor | None
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
        self._methods: dict[Compressor, int] = {}
        self._pieces: dict[_Family, dict[int, list[tuple[object, _Unit]]]] = {}  # by class of tensors
        self._known_messages: dict[_Family, dict[Item, list[_Message]]] = {}
        self._forms: dict[tuple[Skeletons, _Family], dict[tuple[Program, bool], Form]] = {}
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
        return joined(pieces, list(families.values()), len(self._lanes) + FIRST_LANE)

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

    def _piece(self, family: _Family, items: Sequence[Item], options: Sequence[Option]) -> TablePiece:
        messages = self._messages_of(family, items)
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
        units = self._units(flat)
        skeletons = self._problem.pricer.skeletons(family.kind, units)
        known = self._forms.setdefault((skeletons, family), {})
        forms = []
        for option in options:
            key = (option.program, option.root is None)
            if key not in known:
                known[key] = self._form(skeletons, option)
            forms.append(known[key])
        table = FormTable.of(forms, [option.channel for option in options], chains)
        prices = self._prices(skeletons, table, flat, dtype_of, units)
        return filled(table, prices, column, usable)

    def _users(self, family: _Family) -> frozenset[int]:
        """The tensors for which a family is an option."""
        tensors = frozenset(range(len(self._classes)))
        if family.kind == MessageKind.IN_PLACE:
            return tensors
        return self._problem.users[family.compressor]

    def _messages_of(self, family: _Family, items: Sequence[Item]) -> list[list[_Message]]:
        """The messages of each item, in the order of their submission. Results are kept, of small items at least."""
        known = self._known_messages.setdefault(family, {})
        if len(known) > _KEPT_ITEMS:
            known.clear()
        for item in items:
            if item not in known:
                known[item] = self._messages(family, item)
        return [known[item] for item in items]

    def _messages(self, family: _Family, item: Item) -> list[_Message]:
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
        pieces = cut(numel, family.parts) if isinstance(method, Codec) else ((0, numel),)
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

    def _prices(
        self,
        skeletons: Skeletons,
        table: FormTable,
        messages: list[_Message],
        dtypes: list[torch.dtype],
        units: Sequence[Units],
    ) -> PriceColumns:
        """The prices of all needs of a table, for messages that may have different dtypes."""
        pricer, columns = (
            self._problem.pricer,
            PriceColumns(table.needs, len(messages), self.resources, self._capacities),
        )
        for dtype in dict.fromkeys(dtypes):
            members = [index for index, other in enumerate(dtypes) if other == dtype]
            same = units if len(members) == len(messages) else [each.of_messages(members) for each in units]
            columns.add(members, pricer.prices(skeletons, table.needs, same, dtype))
        return columns

    def _form(self, skeletons: Skeletons, option: Option) -> Form:
        """The form of an option on this machine.

        Most ranks are the roots of few messages if these have different roots. So without a root it is that of a rank
        on another machine than the root, and with another place on it: where it has no part, it waits.
        """
        stages = []
        for spec, need, roots in zip(*skeletons.of(option.program), strict=True):
            waits = option.root is None and any(self._problem.topology.size(level) > 1 for level in roots.ranks)
            stages.append(StageColumn(None if waits else spec, (need,), waits))
        stages = shortened(stages)
        routes = [[self._route(stage.spec, channel) for stage in stages] for channel in range(MAX_CHANNELS)]
        return Form.of(stages, routes, ends=not option.in_place)

    def _route(self, spec: StageSpec | None, channel: int) -> tuple[int, bool, bool]:
        """The lane of a stage; whether it has a lead; whether it waits for the lane."""
        if spec is None:
            return NOWHERE, False, False
        if self._delays_backward and spec.resource == Resource.COMPUTE and spec.phase == 0:
            return BACKWARD, False, True
        key = lane_key(spec.resource, spec.phase, channel)
        if spec.starts_immediately:
            return (SINK, True, False) if self._on_host else (self._lane(("at once", key)), False, True)
        overlaps = key.resource == Resource.HOST_COMMUNICATE
        return self._lane(key), overlaps or (self._on_host and key.resource == Resource.COMMUNICATE), True

    def _lane(self, key: Hashable) -> int:
        return self._lanes.setdefault(key, FIRST_LANE + len(self._lanes))


def _family(option: Option) -> _Family:
    if option.in_place:
        return _Family(MessageKind.IN_PLACE, None, False, 1)
    low_rank = option.compressor is not None and not isinstance(option.compressor, Codec)
    kind = MessageKind.LOW_RANK if low_rank else MessageKind.ENCODED
    sums = any(isinstance(step, AllReduce) for step in option.program)
    return _Family(kind, option.compressor, sums, 1 if low_rank else option.parts)
