"""Prices of messages: the stages of a message with what each costs on a machine.

:meth:`Pricer.messages` prices messages of a plan, :meth:`Pricer.table` many messages in many programs at once. Both add
up the same features of the units: their number, their elements and their bytes
(:mod:`gckernels.sync.programs.layouts`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.plans.grouping import MessageSpec
from gckernels.sync.programs.layouts import Capabilities, Content, Extent
from gckernels.sync.programs.named import ALLGATHER
from gckernels.sync.programs.spans import GATHER, MEAN, Span
from gckernels.sync.programs.stages import MessageKind
from gckernels.sync.programs.steps import Program
from gckernels.sync.traces.traced_tensors import Role, TracedTensor

from ..machines.machine import Floats, Machine, MachineError, Price, Sharding, Shared
from .priced_stages import PricedStage
from .stage_templates import Coding, Copying, Operation, Sending, templates_of

Ints: TypeAlias = npt.NDArray[np.intp]
_KEPT = 500
"""Messages whose prices are kept if no more are priced at once."""
_Form: TypeAlias = tuple[MessageKind, Program, torch.dtype, tuple[Compressor, ...]]
_Sizes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Units:
    """Units of some messages that have the same compressor. Messages are runs of one list of units."""

    compressor: Compressor  # the fitted compressor
    numels: tuple[int, ...]  # [sizes], the distinct numbers of elements
    sizes: Ints  # for each unit of the list the number of its size
    starts: Ints  # starts, stops: [n], the first unit of each message, and the one behind its last
    stops: Ints
    _elements: dict[Extent, Floats] = field(default_factory=dict, init=False)
    _nbytes: dict[tuple[Extent, int, int], Floats] = field(default_factory=dict, init=False)

    @staticmethod
    def of(compressor: Compressor, messages: Sequence[Sequence[int]]) -> Units:
        """The units with ``compressor`` of messages, given the numbers of elements of each message's units."""
        everything = np.array([numel for numels in messages for numel in numels], dtype=np.intp)
        numels, sizes = np.unique(everything, return_inverse=True)
        stops = np.cumsum([len(each) for each in messages])
        return Units(compressor, tuple(numels.tolist()), sizes, np.concatenate([[0], stops[:-1]]), stops)

    def total(self, values: Sequence[float]) -> Floats:
        """``[n]``, the sum over the units of each message of ``values [sizes]``, which must be integers."""
        so_far = np.concatenate([[0.0], np.array(values, dtype=np.float64)[self.sizes].cumsum()])
        result: Floats = so_far[self.stops] - so_far[self.starts]
        return result

    @functools.cached_property
    def counts(self) -> Floats:
        """``[n]``, the number of units of each message."""
        return (self.stops - self.starts).astype(np.float64)

    def elements(self, extent: Extent) -> Floats:
        """``[n]``, the elements of an extent of all units."""
        if extent not in self._elements:
            self._elements[extent] = self.total([extent.elements(each) for each in self.numels])
        return self._elements[extent]

    def nbytes(self, content: Content, itemsize: int) -> Floats:
        """``[n]``, the bytes of a content of all units, whose gradients have ``itemsize`` bytes for each element."""
        key = (content.extent, content.form, itemsize)
        if key not in self._nbytes:
            one = content._replace(pieces=1)
            self._nbytes[key] = self.total([one.nbytes(each, itemsize, self._round_nbytes) for each in self.numels])
        result: Floats = content.pieces * self._nbytes[key]
        return result

    @functools.cached_property
    def _round_nbytes(self) -> Callable[[int, int], int]:
        return functools.cache(self.compressor.round_nbytes)  # units and extents often have the same size


class Pricer:
    """Prices messages on a machine.

    Args:
        sharding: the shards of a model of FSDP2; ``None`` for other models.
        rest: called before each price, and for each timeline. A search does one or the other every few milliseconds.
    """

    def __init__(
        self, machine: Machine, sharding: Sharding | None = None, rest: Callable[[], None] = lambda: None
    ) -> None:
        self.machine, self.sharding, self._rest = machine, sharding, rest
        self._span = MEAN if sharding is None else sharding.span
        self._apart = machine.computes_on != Shared.CORES
        self._known: dict[tuple[_Form, _Sizes], tuple[PricedStage, ...]] = {}

    def on(self, machine: Machine) -> Pricer:
        """The same pricer for another machine."""
        return Pricer(machine, self.sharding, self._rest)

    def messages(
        self, messages: Sequence[tuple[MessageSpec, torch.dtype]], span: Span | None = None
    ) -> list[tuple[PricedStage, ...]]:
        """The stages of every message with their prices, arrays of one entry. Results are kept, unless there are very
        many of them, which are priced fast together and need much memory.

        Args:
            messages: the messages, each with the dtype of its bucket.
            span: as for :meth:`table`.

        Raises:
            MachineError: the machine lacks a price.
        """
        self._rest()
        keys = [(_form(message, dtype), _sizes(message)) for message, dtype in messages]
        found = {key: self._known[key] for key in keys if key in self._known}
        new: dict[_Form, dict[_Sizes, None]] = {}  # messages of a form are priced together
        for key in keys:
            if key not in found:
                new.setdefault(key[0], {})[key[1]] = None
        for form, each in new.items():
            kind, program, dtype, methods = form
            groups = [Units.of(method, numels) for method, numels in zip(methods, zip(*each, strict=True), strict=True)]
            row = self.stages(kind, program, groups, dtype, span)
            for at, sizes in enumerate(each):
                found[form, sizes] = tuple(replace(stage, price=stage.price.entry(at)) for stage in row)
        if sum(map(len, new.values())) <= _KEPT:
            self._known.update(found)
        return [found[key] for key in keys]

    def gather(self, tensors: Sequence[TracedTensor], weights: Codec) -> tuple[PricedStage, ...]:
        """The stages of a gather of parameters, at least one, which are encoded; vectors are sent exactly.

        Raises:
            MachineError: the machine lacks a price.
        """
        numels: dict[Compressor, list[int]] = {}
        for tensor in sorted(tensors, key=lambda each: each.role is Role.VECTOR):
            numels.setdefault(Identity() if tensor.role is Role.VECTOR else weights, []).append(tensor.numel)
        groups = [Units.of(method, [each]) for method, each in numels.items()]
        return self.stages(MessageKind.ENCODED, ALLGATHER, groups, tensors[0].dtype, GATHER)

    def stages(
        self,
        kind: MessageKind,
        program: Program,
        groups: Sequence[Units],
        dtype: torch.dtype,
        span: Span | None = None,
    ) -> tuple[PricedStage, ...]:
        """The priced stages of ``n`` messages in one program; the arguments are those of :meth:`table`.

        Raises:
            MachineError: the machine lacks a price.
        """
        (found,) = self.table(kind, [program], groups, dtype, span)
        if isinstance(found, MachineError):
            raise found
        return found

    def table(
        self,
        kind: MessageKind,
        programs: Sequence[Program],
        groups: Sequence[Units],
        dtype: torch.dtype,
        span: Span | None = None,
    ) -> list[tuple[PricedStage, ...] | MachineError]:
        """The priced stages of ``n`` messages in every program, of which all messages have the same kind.

        Args:
            programs: programs that are valid for all compressors.
            groups: the units of the messages, by compressor. The first one's capabilities decide the stages.
            dtype: the dtype of the gradients.
            span: the states between which the programs go; by default those of gradients.

        Returns:
            For each program its stages, with prices ``[n]``; the error of a price that the machine lacks.
        """
        capabilities = tuple(dict.fromkeys(Capabilities.of(group.compressor) for group in groups))
        numbered = [(group, capabilities.index(Capabilities.of(group.compressor))) for group in groups]
        prices: dict[int, Price | MachineError] = {}  # by identity, which equal operations share
        found: list[tuple[PricedStage, ...] | MachineError] = []
        for program in programs:
            stages: list[PricedStage] = []
            settings = (self.machine.topology, self._apart, span or self._span)
            for spec, operation, roots in templates_of(kind, program, capabilities, *settings):
                if id(operation) not in prices:
                    prices[id(operation)] = self._price_or_error(operation, numbered, dtype.itemsize)
                price = prices[id(operation)]
                if isinstance(price, MachineError):
                    found.append(price)
                    break
                stages.append(PricedStage(spec, price, roots))
            else:
                found.append(tuple(stages))
        return found

    def _price_or_error(
        self, operation: Operation, groups: Sequence[tuple[Units, int]], itemsize: int
    ) -> Price | MachineError:
        """The price ``[n]`` of an operation; the error if the machine lacks it."""
        overheads = self.machine.overheads
        self._rest()
        try:
            price = self._price(operation, groups, itemsize)
        except MachineError as error:
            return error
        return replace(price, alone_s=price.alone_s + overheads.stage_s, submit_s=price.submit_s + overheads.submit_s)

    def _price(self, operation: Operation, groups: Sequence[tuple[Units, int]], itemsize: int) -> Price:
        """The price of an operation, without overheads.

        Args:
            groups: the units, each with the number of their kind, for which the operation names contents.
            itemsize: the bytes of an element of the gradients.
        """
        machine = self.machine
        match operation:
            case Sending(step, level, place, from_roots, sent):
                wire = _total(units.nbytes(sent[kind][0], itemsize) * sent[kind][1] for units, kind in groups)
                return machine.collective(step, level, place, wire, from_roots)
            case Copying(resource, contents, at_most):
                copied = _total(units.nbytes(contents[kind], itemsize) for units, kind in groups)
                if at_most:
                    copied = np.minimum(copied, _total(units.nbytes(at_most[kind], itemsize) for units, kind in groups))
                to = machine.computes_on if resource is None else Shared(resource.value)
                return machine.copy(to, copied)
            case Coding(work, place, extents, sources):
                codecs = (
                    machine.codec(work, units.compressor, place, units.counts, units.elements(extents[kind]), sources)
                    for units, kind in groups
                )
                return functools.reduce(operator.add, codecs)


def _form(message: MessageSpec, dtype: torch.dtype) -> _Form:
    """The properties that messages which are priced together have in common."""
    return message.kind, message.program, dtype, tuple(dict.fromkeys(unit.plan.compressor for unit in message.units))


def _sizes(message: MessageSpec) -> _Sizes:
    """The sizes of the units of a message for each of their methods, in the order of the form."""
    sizes: dict[Compressor, list[int]] = {}
    for unit in message.units:
        sizes.setdefault(unit.plan.compressor, []).append(unit.plan.numel)
    return tuple(tuple(sorted(each)) for each in sizes.values())


def _total(columns: Iterable[Floats]) -> Floats:
    return functools.reduce(np.add, columns)
