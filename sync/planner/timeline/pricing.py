"""Prices of messages: the stages of a message with what each costs on a machine.

:meth:`Pricer.message` prices one message, :meth:`Pricer.table` many messages in many programs at once. Both add up the
same features of the units: their number, their elements and their bytes (:mod:`gckernels.sync.programs.contents`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import torch

from gckernels.compressor import Compressor

from ...plans.grouping import MessageSpec
from ...programs.layouts import Capabilities, Content, Extent
from ...programs.stages import MessageKind
from ...programs.steps import Program
from ..machines.machine import Floats, Machine, MachineError, Price, Shared
from .priced_stages import PricedStage
from .stage_templates import Coding, Copying, Need, Sending, Skeletons, skeletons_for

_KEPT = 500
"""Messages whose prices are kept if no more are priced at once."""
_Form: TypeAlias = tuple[MessageKind, Program, torch.dtype, tuple[Compressor, ...]]
_Sizes: TypeAlias = tuple[tuple[int, ...], ...]


class Totals(Protocol):
    """Units of some messages that have the same compressor, of which sums are known."""

    @property
    def compressor(self) -> Compressor:
        """The fitted compressor."""

    @property
    def numels(self) -> tuple[int, ...]:
        """The distinct numbers of elements."""

    def total(self, values: Floats) -> Floats:
        """``[n]``, the sum over the units of each message of ``values [sizes]``."""


@dataclass(frozen=True)
class Units:
    """Units of some messages that have the same compressor.

    Attributes:
        compressor: the fitted compressor.
        numels: ``[sizes]``, the distinct numbers of elements.
        counts: ``float64 [sizes, n]``, how many units of each size each message has.
    """

    compressor: Compressor
    numels: tuple[int, ...]
    counts: Floats

    @staticmethod
    def of(compressor: Compressor, messages: Sequence[Iterable[int]]) -> Units:
        """The units with ``compressor`` of messages, given the numbers of elements of each message's units."""
        tallies = [Counter(numels) for numels in messages]
        numels = tuple(sorted(set().union(*tallies)))
        row = {numel: index for index, numel in enumerate(numels)}
        counts = np.zeros((len(numels), len(tallies)))
        for message, tally in enumerate(tallies):
            for numel, count in tally.items():
                counts[row[numel], message] = count
        return Units(compressor, numels, counts)

    def total(self, values: Floats) -> Floats:
        """``[n]``, the sum over the units of each message of ``values [sizes]``."""
        return values @ self.counts

    def of_messages(self, members: Sequence[int]) -> Units:
        """The units of some of the messages."""
        return Units(self.compressor, self.numels, self.counts[:, members])


class Pricer:
    """Prices messages on a machine.

    Args:
        machine: the machine.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._apart = machine.computes_on != Shared.CORES
        self._known: dict[tuple[_Form, _Sizes], tuple[PricedStage, ...]] = {}

    def on(self, machine: Machine) -> Pricer:
        """The same pricer for another machine."""
        return Pricer(machine)

    def message(self, message: MessageSpec, dtype: torch.dtype) -> tuple[PricedStage, ...]:
        """The stages of one message with their prices, as :meth:`messages` returns them."""
        (stages,) = self.messages([(message, dtype)])
        return stages

    def messages(self, messages: Sequence[tuple[MessageSpec, torch.dtype]]) -> list[tuple[PricedStage, ...]]:
        """The stages of every message with their prices, arrays of one entry. Results are kept, unless there are very
        many of them, which are priced fast together and need much memory.

        Args:
            messages: the messages, each with the dtype of its bucket.

        Raises:
            MachineError: the machine lacks a price.
        """
        keys = [(_form(message, dtype), _sizes(message)) for message, dtype in messages]
        found = {key: self._known[key] for key in keys if key in self._known}
        new: dict[_Form, dict[_Sizes, None]] = {}  # messages of a form are priced together
        for key in keys:
            if key not in found:
                new.setdefault(key[0], {})[key[1]] = None
        for form, each in new.items():
            kind, program, dtype, methods = form
            groups = [Units.of(method, numels) for method, numels in zip(methods, zip(*each, strict=True), strict=True)]
            (row,) = self.table(kind, (program,), groups, dtype)
            for at, sizes in enumerate(each):
                found[form, sizes] = tuple(replace(stage, price=stage.price.entry(at)) for stage in row)
        if sum(map(len, new.values())) <= _KEPT:
            self._known.update(found)
        return [found[key] for key in keys]

    def table(
        self, kind: MessageKind, programs: Sequence[Program], groups: Sequence[Totals], dtype: torch.dtype
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
        skeletons = self.skeletons(kind, groups)
        rows = [skeletons.of(program) for program in programs]
        prices = self.prices(skeletons, {need for row in rows for need in row.needs}, groups, dtype)
        if missing := [each for each in prices.values() if isinstance(each, MachineError)]:
            raise missing[0]
        known = {number: price for number, price in prices.items() if isinstance(price, Price)}
        return [
            tuple(
                PricedStage(spec, known[need], roots)
                for spec, need, roots in zip(row.specs, row.needs, row.roots, strict=True)
            )
            for row in rows
        ]

    def skeletons(self, kind: MessageKind, groups: Sequence[Totals]) -> Skeletons:
        """The skeletons for messages of one kind.

        Args:
            kind: the kind of the messages.
            groups: their units, as for :meth:`table`.
        """
        capabilities = tuple(dict.fromkeys(Capabilities.of(group.compressor) for group in groups))
        return skeletons_for(kind, capabilities, self.machine.topology, self._apart)

    def prices(
        self, skeletons: Skeletons, needs: Iterable[int], groups: Sequence[Totals], dtype: torch.dtype
    ) -> dict[int, Price | MachineError]:
        """The prices ``[n]`` of needs in ``n`` messages, by number; the error of those that the machine has not.

        Args:
            skeletons: the skeletons of the messages.
            needs: the numbers of the needs.
            groups: the units of the messages, as for :meth:`table`.
            dtype: the dtype of the gradients.
        """
        kinds = {each: number for number, each in enumerate(dict.fromkeys(map(_capabilities, groups)))}
        amounts = [Amounts(group, dtype, kinds[_capabilities(group)]) for group in groups]
        overheads = self.machine.overheads
        prices: dict[int, Price | MachineError] = {}
        for number in needs:
            try:
                price = self._price(skeletons.needs[number], amounts)
            except MachineError as error:
                prices[number] = error
                continue
            prices[number] = replace(
                price, alone_s=price.alone_s + overheads.stage_s, submit_s=price.submit_s + overheads.submit_s
            )
        return prices

    def _price(self, need: Need, amounts: Sequence[Amounts]) -> Price:
        """The price of a need, without overheads."""
        machine = self.machine
        match need:
            case Sending(step, level, place, from_roots, sent):
                wire = _total(each.nbytes(sent[each.kind][0]) * sent[each.kind][1] for each in amounts)
                return machine.collective(step, level, place, wire, from_roots)
            case Copying(resource, contents, at_most):
                copied = _total(each.nbytes(contents[each.kind]) for each in amounts)
                if at_most:
                    copied = np.minimum(copied, _total(each.nbytes(at_most[each.kind]) for each in amounts))
                to = machine.computes_on if resource is None else Shared(resource.value)
                return machine.copy(to, copied)
            case Coding(kind, place, extents, sources):
                codecs = (
                    machine.codec(kind, each.compressor, place, each.units, each.numel(extents[each.kind]), sources)
                    for each in amounts
                )
                return functools.reduce(_added, codecs)


class Amounts:
    """Elements and bytes of units with one method, added up per message.

    Args:
        units: the units.
        dtype: the dtype of the gradients.
        kind: the number of their kind, for which needs name contents.

    Attributes:
        compressor: their method.
        units: ``[n]``, the number of units.
        kind: as given.
    """

    def __init__(self, units: Totals, dtype: torch.dtype, kind: int) -> None:
        self.compressor, self.units, self.kind = units.compressor, units.total(np.ones(len(units.numels))), kind
        self._units, self._itemsize = units, dtype.itemsize
        self._elements: dict[Extent, Floats] = {}
        self._nbytes: dict[tuple[Extent, int], Floats] = {}
        self._payloads: dict[tuple[int, int], int] = {}  # units and extents often have the same size

    def numel(self, extent: Extent) -> Floats:
        """``[n]``, the elements of an extent of all units."""
        if extent not in self._elements:
            sizes = [float(extent.elements(each)) for each in self._units.numels]
            self._elements[extent] = self._units.total(np.array(sizes))
        return self._elements[extent]

    def nbytes(self, content: Content) -> Floats:
        """``[n]``, the bytes of a content of all units."""
        key = (content.extent, content.form)
        if key not in self._nbytes:
            one = content._replace(pieces=1)
            sizes = [float(one.nbytes(each, self._itemsize, self._payload_nbytes)) for each in self._units.numels]
            self._nbytes[key] = self._units.total(np.array(sizes))
        result: Floats = content.pieces * self._nbytes[key]
        return result

    def _payload_nbytes(self, numel: int, round_: int) -> int:
        key = (numel, round_)
        if key not in self._payloads:
            self._payloads[key] = self.compressor.round_nbytes(numel, round_)
        return self._payloads[key]


def _form(message: MessageSpec, dtype: torch.dtype) -> _Form:
    """The properties that messages which are priced together have in common."""
    return message.kind, message.program, dtype, tuple(dict.fromkeys(unit.plan.compressor for unit in message.units))


def _sizes(message: MessageSpec) -> _Sizes:
    """The sizes of the units of a message for each of their methods, in the order of the form."""
    sizes: dict[Compressor, list[int]] = {}
    for unit in message.units:
        sizes.setdefault(unit.plan.compressor, []).append(unit.plan.numel)
    return tuple(tuple(sorted(each)) for each in sizes.values())


def _capabilities(group: Totals) -> Capabilities:
    return Capabilities.of(group.compressor)


def _total(columns: Iterable[Floats]) -> Floats:
    return functools.reduce(np.add, columns)


def _added(one: Price, other: Price) -> Price:
    """The price of both works, one after the other, in one stage."""
    keys = {*one.work_s, *other.work_s}
    none = np.zeros_like(one.alone_s)
    work: Mapping[Shared, Floats] = {key: one.work_s.get(key, none) + other.work_s.get(key, none) for key in keys}
    return Price(one.alone_s + other.alone_s, work, one.submit_s + other.submit_s)
