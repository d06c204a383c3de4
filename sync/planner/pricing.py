"""Prices of messages: the stages of a message with what each costs on a machine.

:meth:`Pricer.message` prices one message, :meth:`Pricer.table` many messages in many programs at once. Both add up the
same features of the units: their number, their elements and their bytes, from
:func:`~gckernels.sync.programs.size_tables.size_table`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from gckernels.method import Method

from ..plans.grouping import MessageSpec
from ..programs.lanes import LaneKey, lane_key
from ..programs.layouts import Capabilities, propagate
from ..programs.size_tables import size_table
from ..programs.stages import MessageKind, StageKind, StageSpec, stages_of
from ..programs.steps import Collective, Program
from .machine import Floats, Machine, Price, Shared


@dataclass(frozen=True)
class PricedStage:
    """A stage and its price, for any number of messages with the same stages.

    Attributes:
        spec: the stage.
        price: its price in every message.
    """

    spec: StageSpec
    price: Price

    def lane(self, channel: int = 0) -> LaneKey:
        """The lane of the stage in a message on ``channel``."""
        return lane_key(self.spec.resource, self.spec.phase, channel)


@dataclass(frozen=True)
class Units:
    """Units of some messages that have the same compressor.

    Attributes:
        compressor: the fitted compressor.
        numels: ``[sizes]``, the distinct numbers of elements.
        counts: ``float64 [sizes, n]``, how many units of each size each message has.
    """

    compressor: Method
    numels: tuple[int, ...]
    counts: Floats

    @staticmethod
    def of(compressor: Method, messages: Sequence[Iterable[int]]) -> Units:
        """The units with ``compressor`` of messages, given the numbers of elements of each message's units."""
        tallies = [Counter(numels) for numels in messages]
        numels = tuple(sorted(set().union(*tallies)))
        row = {numel: index for index, numel in enumerate(numels)}
        counts = np.zeros((len(numels), len(tallies)))
        for message, tally in enumerate(tallies):
            for numel, count in tally.items():
                counts[row[numel], message] = count
        return Units(compressor, numels, counts)


@dataclass(frozen=True)
class _Sums:
    """Sizes of units with one compressor, added up per message.

    Attributes:
        compressor: the compressor.
        units: ``[n]``, the number of units.
        numel, nbytes, wire_nbytes: ``[rows, n]``, sums of the rows of a :class:`~.size_tables.SizeTable`.
    """

    compressor: Method
    units: Floats
    numel: Floats
    nbytes: Floats
    wire_nbytes: Floats


class Pricer:
    """Prices messages on a machine.

    Args:
        machine: the machine.
        keep_unused: as for :func:`~gckernels.sync.programs.stages.stages_of`.
    """

    def __init__(self, machine: Machine, keep_unused: bool = False) -> None:
        self.machine, self._keep_unused = machine, keep_unused
        self._apart = machine.computes_on != Shared.CORES
        self._known: dict[object, tuple[PricedStage, ...]] = {}

    def on(self, machine: Machine) -> Pricer:
        """The same pricer for another machine."""
        return Pricer(machine, self._keep_unused)

    def message(self, message: MessageSpec, dtype: torch.dtype) -> tuple[PricedStage, ...]:
        """The stages of one message with their prices, arrays of one entry. Results are kept.

        Args:
            message: the message.
            dtype: the dtype of its bucket.

        Raises:
            MachineError: the machine lacks a price.
        """
        sizes: dict[Method, list[int]] = {}
        for unit in message.units:
            sizes.setdefault(unit.plan.compressor, []).append(unit.plan.numel)
        key = (message.kind, message.program, dtype, *((method, tuple(sorted(each))) for method, each in sizes.items()))
        if key not in self._known:
            groups = [Units.of(compressor, [numels]) for compressor, numels in sizes.items()]
            (self._known[key],) = self.table(message.kind, (message.program,), groups, dtype)
        return self._known[key]

    def table(
        self, kind: MessageKind, programs: Sequence[Program], groups: Sequence[Units], dtype: torch.dtype
    ) -> list[tuple[PricedStage, ...]]:
        """The priced stages of ``n`` messages in every program, of which all messages have the same kind.

        Args:
            kind: the kind of the messages.
            programs: programs that are valid for all compressors.
            groups: the units of the messages, by compressor. The first one's capabilities decide the stages.
            dtype: the dtype of the gradients.

        Returns:
            For each program its stages, with prices ``[n]``.

        Raises:
            MachineError: the machine lacks a price.
        """
        topology = self.machine.topology
        sums: list[_Sums] = []
        first_rows: tuple[int, ...] = ()
        for group in groups:
            table = size_table(programs, group.numels, dtype, group.compressor, topology)
            first_rows = table.first_rows
            columns = (table.numel, table.nbytes, table.wire_nbytes)
            numel, nbytes, wire = (column.double().numpy() @ group.counts for column in columns)
            sums.append(_Sums(group.compressor, group.counts.sum(axis=0), numel, nbytes, wire))
        capabilities = Capabilities.of(groups[0].compressor)
        rows = _Rows.of(sums)
        known: dict[object, Price] = {}  # programs have many stages in common
        priced = []
        for program, row in zip(programs, first_rows, strict=True):
            specs = stages_of(kind, program, capabilities, topology, self._apart, self._keep_unused)
            sources = [layout.sources for layout in propagate(program, capabilities, topology)]
            stages = []
            for spec in specs:
                key = _need(spec, program, row, rows, sources)
                if key not in known:
                    known[key] = self._price(spec, program, row, sums, sources)
                stages.append(PricedStage(spec, known[key]))
            priced.append(tuple(stages))
        return priced

    def _price(
        self, spec: StageSpec, program: Program, row: int, sums: Sequence[_Sums], sources: Sequence[int]
    ) -> Price:
        """The price of a stage.

        Args:
            spec: the stage.
            program: its program, with its first state in ``row`` of the sums.
            sums: the sizes of all units, by compressor.
            sources: the number of payloads for the same elements, for each state of the program.
        """
        machine, before, after = self.machine, row + spec.first, row + spec.stop
        match spec.kind:
            case StageKind.COLLECTIVE | StageKind.AVERAGE:
                step = program[spec.first]
                assert isinstance(step, Collective)
                wire = _total(each.wire_nbytes[after] for each in sums)
                price = machine.collective(type(step).__name__, step.level, spec.place, wire)
            case StageKind.COPY:
                to = Shared(spec.resource.value)
                price = machine.copy(to, _total(each.nbytes[before] for each in sums))
            case StageKind.CUT | StageKind.JOIN:
                copied = _total(each.nbytes[after] for each in sums)
                if spec.kind == StageKind.CUT:  # the share that is sent, which may also be all that there is
                    copied = np.minimum(copied, _total(each.nbytes[before] for each in sums))
                price = machine.copy(machine.computes_on, copied)
            case _:
                at, merges = _encoded_state(spec, row)
                merged = sources[spec.first] if merges else 1
                codecs = (
                    machine.codec(spec.kind, each.compressor, spec.place, each.units, each.numel[at], merged)
                    for each in sums
                )
                price = reduce(_added, codecs)
        overheads = machine.overheads
        return Price(price.alone_s + overheads.stage_s, price.work_s, price.submit_s + overheads.submit_s)


@dataclass(frozen=True)
class _Rows:
    """For each row of the sums a number, which is that of all equal rows.

    Attributes:
        numel, nbytes, wire_nbytes: the numbers, for each kind of sum.
    """

    numel: list[int]
    nbytes: list[int]
    wire_nbytes: list[int]

    @staticmethod
    def of(sums: Sequence[_Sums]) -> _Rows:
        """The numbers of the rows of some sums, all of which have to be equal."""

        def numbers(tables: Sequence[Floats]) -> list[int]:
            known: dict[bytes, int] = {}
            return [known.setdefault(row.tobytes(), len(known)) for row in np.concatenate(tables, axis=1)]

        columns = ([each.numel for each in sums], [each.nbytes for each in sums], [each.wire_nbytes for each in sums])
        return _Rows(*map(numbers, columns))


def _need(spec: StageSpec, program: Program, row: int, rows: _Rows, sources: Sequence[int]) -> object:
    """A key that is equal for stages of the same price."""
    before, after = row + spec.first, row + spec.stop
    match spec.kind:
        case StageKind.COLLECTIVE | StageKind.AVERAGE:
            return spec.kind, type(program[spec.first]), spec.level, spec.place, rows.wire_nbytes[after]
        case StageKind.COPY | StageKind.CUT | StageKind.JOIN:
            return spec.kind, spec.resource, rows.nbytes[before], rows.nbytes[after]
    at, merges = _encoded_state(spec, row)
    return spec.kind, spec.place, rows.numel[at], sources[spec.first] if merges else 1


def _encoded_state(spec: StageSpec, row: int) -> tuple[int, bool]:
    """The row of the elements that a stage encodes or decodes, and whether the stage merges sources."""
    match spec.kind:
        case StageKind.DECODE | StageKind.RECONSTRUCT:
            return row + spec.stop, True
        case StageKind.RECODE:
            return row + spec.first + 1, True
        case StageKind.ENCODE_SHARD:
            return row + spec.stop, False
    return row + spec.first, False


def _total(columns: Iterable[Floats]) -> Floats:
    return reduce(np.add, columns)


def _added(one: Price, other: Price) -> Price:
    """The price of both works, one after the other, in one stage."""
    keys = {*one.work_s, *other.work_s}
    none = np.zeros_like(one.alone_s)
    work: Mapping[Shared, Floats] = {key: one.work_s.get(key, none) + other.work_s.get(key, none) for key in keys}
    return Price(one.alone_s + other.alone_s, work, one.submit_s + other.submit_s)
