"""Rows of items: the stages of every option of every item, priced, for :mod:`~.maxplus`.

An item is a message of a draft. Items whose tensors have the same sizes, shapes, dtypes and compressors are of the same
kind, and are priced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.programs.stages import MessageKind
from gckernels.sync.programs.steps import AllReduce, Program

from ..drafts.drafts import MAX_CHANNELS, Option, cut
from ..drafts.problem import Problem
from ..machines.machine import Floats, MachineError, Shared
from ..timeline.pricing import Ints, Units
from .rows import BACKWARD, FAR_S, NOWHERE, UNUSABLE_S, Gaps, MessageRows, NumberedLanes, Rows

Item: TypeAlias = tuple[int, ...]
"""The tensors of a message."""
_Message: TypeAlias = Mapping[Compressor, Sequence[int]]
"""The sizes of the units of a message, by their fitted methods."""
_KEPT_ITEMS = 10000
"""Items of families whose messages are kept."""


class _Family(NamedTuple):
    """Options whose messages have the same units."""

    kind: MessageKind
    compressor: Compressor | None
    sums: bool  # whether a collective sums payloads, so that units of different payload dtypes are different messages
    parts: int  # the number of parts

    @staticmethod
    def of(option: Option) -> _Family:
        if option.in_place:
            return _Family(MessageKind.IN_PLACE, None, False, 1)
        low_rank = option.compressor is not None and not isinstance(option.compressor, Codec)
        kind = MessageKind.LOW_RANK if low_rank else MessageKind.ENCODED
        sums = any(isinstance(step, AllReduce) for step in option.program)
        return _Family(kind, option.compressor, sums, 1 if low_rank else option.parts)


class RowMaker:
    """Makes rows for items of a problem.

    Args:
        sharing: whether stages that compute before anything is sent delay backward, as they do where backward takes
            all of the resource. The times are then no lower bounds, but closer to the truth.

    Attributes:
        lanes: the lanes of the machine.
    """

    def __init__(self, problem: Problem, sharing: bool = True) -> None:
        self._problem, self.lanes = problem, NumberedLanes(problem.machine, sharing)
        self._cuts: dict[tuple[_Family, int], list[tuple[object, Compressor, int]]] = {}  # by class of tensors
        self._known_messages: dict[tuple[_Family, Item], list[_Message]] = {}
        classes: dict[object, int] = {}
        allowed = problem.allowed
        self._classes = [
            classes.setdefault((each.numel, each.shape, each.dtype, allowed.get(each.name, ())), len(classes))
            for each in problem.trace.tensors
        ]

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

    def gaps(self, computing_s: Floats, firsts: npt.NDArray[np.bool_], rows: Rows) -> Gaps:
        """The time that passes between items.

        Args:
            computing_s: ``[items + 1]``, the seconds of backward before each item, and behind the last one.
            firsts: ``[items + 1]``, which of the items are the first ones of launches.
            rows: the rows of the items.
        """
        machine = self._problem.machine
        hooks_s = np.where(firsts, machine.overheads.hook_s, 0.0)
        work_s = np.zeros((len(computing_s), rows.work_s.shape[2]))
        if machine.computes_on in self.lanes.resources:
            at = self.lanes.resources.index(machine.computes_on)
            share = min(1.0, self.lanes.capacities[at]) / self.lanes.capacities[at]
            work_s[:, at] = share * (computing_s + (hooks_s if machine.computes_on == Shared.CORES else 0.0))
        return Gaps(computing_s + hooks_s, work_s)

    def rows(self, items: Sequence[Item], options: Sequence[Option]) -> Rows:
        """The rows of options for items, each a kind of its own.

        An option that an item may not use, or for which the machine lacks a price, takes infinitely long.
        """
        pieces = list(self._pieces(items, options))
        width = max((len(found.before_s) for *_, found in pieces), default=1)
        chains = max((messages.shape[1] for _, _, messages, _ in pieces), default=1)
        shape = (len(items), chains, len(options), width)
        lanes, several = np.full(shape[1:], NOWHERE, dtype=np.intp), set()
        lanes[:, :, 0] = BACKWARD
        before_s, after_s, first_s = np.full(shape, FAR_S), np.zeros(shape), np.zeros((chains, len(options)))
        before_s[:, 0, :, 0], after_s[:, 0] = 0.0, UNUSABLE_S
        work_s = np.zeros((len(items), len(options), len(self.lanes.resources)))
        flying_s: dict[int, Floats] = {}
        for option, members, messages, found in pieces:
            stages, count = len(found.before_s), messages.shape[1]
            before_s[members, :count, option, :stages] = found.before_s.T[messages]
            after_s[members, :count, option, :stages] = found.after_s.T[messages]
            after_s[members, :count, option, stages:] = found.after_s[-1][messages][:, :, None]
            work_s[members, option] = found.work_s[messages].sum(axis=1)
            first_s[:count, option] = found.first_s
            for number in range(count):
                route = found.lanes[(options[option].channel + number) % MAX_CHANNELS]
                lanes[number, option, :stages] = route
                for stage in np.flatnonzero(found.flying_s.any(axis=1)).tolist():
                    on_lane = flying_s.setdefault(route[stage], np.zeros(work_s.shape[:2]))
                    on_lane[members, option] += found.flying_s[stage, messages[:, number]]
            if count > 1:
                several.add(option)
        work_s = np.concatenate([work_s, *(flying_s[lane][:, :, None] for lane in sorted(flying_s))], axis=2)
        return Rows(
            lanes, before_s, after_s, first_s, work_s, np.array(sorted(several), dtype=np.intp), self.lanes.size
        )

    # ---------------------------------------------------------------- messages

    def _pieces(
        self, items: Sequence[Item], options: Sequence[Option]
    ) -> Iterator[tuple[int, list[int], Ints, MessageRows]]:
        """The rows of options for those items that may use them, items of one dtype together.

        An entry has the number of the option, those of the items, ``[items, chains]`` the numbers of the messages of
        each item (-1 for none), and the rows of these messages.
        """
        families: dict[_Family, list[int]] = {}
        for number, option in enumerate(options):
            families.setdefault(_Family.of(option), []).append(number)
        everything = frozenset(range(len(self._classes)))
        for family, numbers in families.items():
            users = everything if family.kind == MessageKind.IN_PLACE else self._problem.users[family.compressor]
            by_dtype: dict[torch.dtype, list[int]] = {}
            for number, item in enumerate(items):
                if not users.isdisjoint(item):
                    by_dtype.setdefault(self._problem.dtype(item[0]), []).append(number)
            for dtype, members in by_dtype.items():
                of_item = [self._messages(family, items[member]) for member in members]
                messages = np.full((len(members), max(map(len, of_item))), -1, dtype=np.intp)
                flat: list[_Message] = []
                for row, each in enumerate(of_item):
                    messages[row, : len(each)] = range(len(flat), len(flat) + len(each))
                    flat += each
                rows = self._rows_of(family, flat, dtype, [options[number] for number in numbers])
                for number, found in zip(numbers, rows, strict=True):
                    if found is not None:
                        yield number, members, messages, found

    def _messages(self, family: _Family, item: Item) -> list[_Message]:
        """The messages of an item, in the order of their submission. Results are kept, of small items at least."""
        known = self._known_messages
        if len(known) > _KEPT_ITEMS:
            known.clear()
        if (family, item) not in known:
            messages: dict[object, dict[Compressor, list[int]]] = {}
            for tensor in item:
                for key, method, size in self._cut(family, tensor):
                    messages.setdefault(key, {}).setdefault(method, []).append(size)
            known[family, item] = list(messages.values())
        return known[family, item]

    def _cut(self, family: _Family, tensor: int) -> list[tuple[object, Compressor, int]]:
        """The units of a tensor, with keys that are equal for those that share a message."""
        of_class = (family, self._classes[tensor])
        if of_class not in self._cuts:
            method, numel = self._problem.fitted(tensor, family.compressor), self._problem.trace.tensors[tensor].numel
            pieces = cut(numel, family.parts) if isinstance(method, Codec) else ((0, numel),)
            dtype = method.traits.payload_dtype if family.sums else None
            self._cuts[of_class] = [((part, dtype), method, size) for part, (_, size) in enumerate(pieces)]
        return self._cuts[of_class]

    def _rows_of(
        self, family: _Family, messages: Sequence[_Message], dtype: torch.dtype, options: Sequence[Option]
    ) -> list[MessageRows | None]:
        """The rows of each option for some messages; ``None`` where the machine lacks a price."""
        # the first units decide the stages, so those that are sent exactly come last
        methods = list(dict.fromkeys(each for message in messages for each in message))
        methods.sort(key=lambda method: isinstance(method, Identity))
        units = [Units.of(method, [message.get(method, ()) for message in messages]) for method in methods]
        programs = list(dict.fromkeys(option.program for option in options))
        priced = dict(zip(programs, self._problem.pricer.table(family.kind, programs, units, dtype), strict=True))
        known: dict[tuple[Program, bool], MessageRows | None] = {}
        for option in options:
            key, stages = (option.program, option.root is None), priced[option.program]
            if key not in known:
                known[key] = (
                    None if isinstance(stages, MachineError) else self.lanes.rows_of(stages, option, len(messages))
                )
        return [known[option.program, option.root is None] for option in options]
