"""Programs: how a unit is synchronised, as data.

A program is a tuple of steps. :func:`trace` derives what the data is after each step (raw or encoded, the whole unit
or a shard, how many bytes) and refuses programs that do not end with the averaged unit on every rank. The engine
allocates its buffers from that function, the planner takes its sizes from it: nobody else works them out.

Raw data is always a mean, over those ranks whose contributions are in it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from gckernels import Identity
from gckernels.compressor import Compressor, chunk_numel
from gckernels.method import Method

from .named import ENCODED_ALLREDUCE, POWERSGD
from .rules import Flow, Opened, advance
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Decode,
    Encode,
    Gather,
    Hop,
    Level,
    Program,
    ProgramError,
    Reduce,
    ReduceScatter,
    Step,
    describe,
)
from .topology import Topology


@dataclass(frozen=True)
class Data:
    """What a rank holds of a unit between two steps.

    Attributes:
        numel: elements of the unit, or those that a shard is laid out for (the last shards may hold fewer).
        flow: raw or encoded, what is merged, what the rank has a part of.
        dtype: of raw data.
        sources: payloads side by side of the same elements, to be merged.
        chunks: parts side by side, each with a payload of its own.
        size: elements that each payload is laid out for.
        nbytes: bytes of all of it: ``sources * chunks`` payloads, or the raw numbers.
    """

    numel: int
    flow: Flow
    dtype: torch.dtype
    sources: int
    chunks: int
    size: int
    nbytes: int


def trace(program: Program, numel: int, dtype: torch.dtype, compressor: Method, topology: Topology) -> tuple[Data, ...]:
    """What the data is before the first step and after each: ``len(program) + 1`` entries.

    Args:
        program: the steps.
        numel: elements of the unit.
        dtype: of the gradient.
        compressor: what ``Encode`` and ``Decode`` use.
        topology: of the ranks.

    Raises:
        ProgramError: a step does not fit what the data is, or the mean of the whole unit is not what comes out.
    """
    if not isinstance(program, tuple):
        raise ProgramError(f"program: expected a tuple of steps, got {program!r}")
    known = all(isinstance(step, Step) for step in program)  # what is no step may have no hash
    return (_trace if known else _trace.__wrapped__)(program, numel, dtype, compressor, topology)


@functools.lru_cache(maxsize=1024)
def _trace(
    program: Program, numel: int, dtype: torch.dtype, compressor: Method, topology: Topology
) -> tuple[Data, ...]:
    """Kept: a model has hundreds of units of a few sizes, and each is traced when the plan is checked and again when
    its message is built."""
    tracer = _Rounds if compressor.rounds > 1 or program == POWERSGD else _Tracer
    return tracer(program, numel, dtype, compressor, topology).states()


class _Tracer:
    """The arguments of :func:`trace`, and what follows from them for the program as a whole."""

    def __init__(
        self, program: Program, numel: int, dtype: torch.dtype, compressor: Method, topology: Topology
    ) -> None:
        self.program, self.numel, self.dtype = program, numel, dtype
        self.compressor, self.topology = compressor, topology
        parted = {step.level for step in program if isinstance(step, ReduceScatter | AllToAll | Hop)}
        self.split_levels = parted
        self.grain = chunk_numel(numel, self._ranks(parted))  # the smallest part there will be

    def states(self) -> tuple[Data, ...]:
        data = Data(self.numel, Flow(), self.dtype, 1, 1, self.numel, self.numel * self.dtype.itemsize)
        states = [data]
        for index, step in enumerate(self.program):
            try:
                data = self._after(index, step, data)
            except ValueError as error:  # of the compressor, too
                raise ProgramError(
                    f"program {describe(self.program)}: step {index}, {describe((step,))}: {error}"
                ) from error
            states.append(data)
        if not data.flow.done:
            raise ProgramError(f"program {describe(self.program)}: does not end with the averaged unit on every rank")
        return tuple(states)

    def _after(self, index: int, step: Step, data: Data) -> Data:
        self._check_method(index, step, data)
        flow = advance(data.flow, step, self.topology, self.compressor.summable)
        numel = self._piece(flow)
        match step:
            case Encode():
                chunks = self._chunks(index)
                size = self.grain * self._ranks(self._whole(flow)) // chunks if chunks > 1 else numel
                if isinstance(following := self._next(index), Hop):  # a shard of the piece
                    size = self._piece(Flow(opened=(*flow.opened, Opened(following.level, True))))
                return self._encoded(flow, numel, 1, chunks, size)
            case Decode():
                again = isinstance(self._next(index), Encode)
                return self._raw(flow, torch.float32 if again and flow.opened else self.dtype)
            case _ if not flow.encoded:
                return self._raw(flow, self.dtype)
            case Hop():
                return self._encoded(flow, numel, 1, 1, data.size)
        ranks = self.topology.size(step.level)
        sources, chunks = data.sources, data.chunks
        if isinstance(step, AllToAll):
            chunks //= ranks
        if isinstance(step, AllToAll | Gather) or (isinstance(step, AllGather) and flow.opened == data.flow.opened):
            sources *= ranks
        elif isinstance(step, AllGather):
            chunks *= ranks
        return self._encoded(flow, numel, sources, chunks, data.size)

    def _check_method(self, index: int, step: Step, data: Data) -> None:
        name, one_shot = self.compressor.name, isinstance(self.compressor, Compressor)
        match step:
            case AllReduce() if data.flow.encoded and not self.compressor.summable:
                raise ProgramError(f"payloads of {name} cannot be added")
            case Encode() if not one_shot and self.program[index + 1 :] != ENCODED_ALLREDUCE[1:]:
                raise ProgramError(f"what {name} sends has no parts, and is added up, not gathered")
            case Hop() if self.compressor.applies_momentum or not self.compressor.averages:
                raise ProgramError(f"{name} cannot encode sums on their way around a ring")

    # ---------------------------------------------------------------- how much of the unit

    def _ranks(self, levels: set[Level]) -> int:
        return math.prod(self.topology.size(level) for level in levels)

    def _whole(self, flow: Flow) -> set[Level]:
        """The levels that the program splits, and has not split here or has gathered again."""
        return self.split_levels - {opened.level for opened in flow.opened if opened.split}

    def _piece(self, flow: Flow) -> int:
        """Elements of the part of the unit that a rank has, or that its shard is laid out for."""
        if any(opened.split for opened in flow.opened):
            return self.grain * self._ranks(self._whole(flow))
        return self.numel

    def _next(self, index: int) -> Step | None:
        return self.program[index + 1] if index + 1 < len(self.program) else None

    def _chunks(self, index: int) -> int:
        """Payloads that an encoding makes: one for every rank that one is sent to before they are decoded."""
        parted = set()
        for step in self.program[index + 1 :]:
            if isinstance(step, Decode):
                break
            if isinstance(step, AllToAll):
                parted.add(step.level)
        return self._ranks(parted)

    # ---------------------------------------------------------------- how many bytes

    def _raw(self, flow: Flow, dtype: torch.dtype) -> Data:
        numel = self._piece(flow)
        return Data(numel, flow, dtype, 1, 1, numel, numel * dtype.itemsize)

    def _encoded(self, flow: Flow, numel: int, sources: int, chunks: int, size: int, round_: int = 0) -> Data:
        nbytes = sources * chunks * self.compressor.round_nbytes(size, round_)
        return Data(numel, flow, self.dtype, sources, chunks, size, nbytes)


class _Rounds(_Tracer):
    """For methods of two rounds, and for what is sent exactly beside them: that has one round, and nothing to say in
    the other."""

    def states(self) -> tuple[Data, ...]:
        method, shown = self.compressor.name, f"program {describe(self.program)}"
        if self.program != POWERSGD:
            raise ProgramError(f"{shown}: {method} takes two rounds, {describe(POWERSGD)}")
        exact = isinstance(self.compressor, Compressor) and self.compressor.summable
        exact = exact and self.compressor.payload_dtype == torch.float32
        if not exact and self.compressor.rounds < 2:
            raise ProgramError(f"{shown}: what {method} sends takes one round, and is not added up in fp32")
        try:
            return self._two_rounds()
        except ValueError as error:  # of the compressor
            raise ProgramError(f"{shown}: step 0, Encode: {error}") from error

    def _two_rounds(self) -> tuple[Data, ...]:
        raw, merged = Flow(), frozenset({Level.FLAT})
        flows = [Flow(encoded=True, fresh=True), Flow(encoded=True, merged=merged)]
        rounds = [self._encoded(flow, self.numel, 1, 1, self.numel, round_) for round_ in range(2) for flow in flows]
        return (self._raw(raw, self.dtype), *rounds, self._raw(Flow(merged=merged), self.dtype))


def piece_bounds(program: Program, numel: int, flow: Flow, topology: Topology, rank: int) -> tuple[int, int]:
    """``(start, stop)`` of what rank ``rank`` has of a unit of ``numel`` elements, where its program is at ``flow``;
    also what it would have, where another rank is the root."""
    tracer = _Tracer(program, numel, torch.float32, Identity(), topology)
    start, size = 0, tracer.grain * tracer._ranks(tracer.split_levels)
    for opened in flow.opened:
        if opened.split:
            size //= topology.size(opened.level)
            start += topology.index(opened.level, rank) * size
    return min(start, numel), min(start + size, numel)


def has_part(flow: Flow, topology: Topology, rank: int, root: int) -> bool:
    """Whether rank ``rank`` has any data, where a program is at ``flow`` and its root is ``root``."""
    rooted = [opened.level for opened in flow.opened if not opened.split]
    return all(topology.index(level, rank) == topology.index(level, root) for level in rooted)


@dataclass(frozen=True)
class Encoding:
    """What a rank encodes of a unit, and keeps a residual of.

    Attributes:
        start, stop: the elements; none where another rank, a root, has them.
        weight: what the residual is worth in the mean. Where several ranks encode the same, and keep the same, it is
            counted once for all of them together.
        copies: ranks, this one among them, that have the same data here, and must keep the same.
        size: elements of what is encoded at once. Of a residual of several states, those of one such stretch lie
            together: one stretch after the other.
    """

    start: int
    stop: int
    weight: float
    copies: int
    size: int


def encoder_of(flow: Flow, topology: Topology, rank: int) -> int:
    """The first of the ranks that have the same data as ``rank``, where a program is at ``flow``: what has been merged
    on a level and is not parted there is on all of its ranks. Random numbers of an encoding must be theirs together."""
    opened = {each.level for each in flow.opened}
    index = {level: topology.index(level, rank) for level in (Level.INTRA, Level.INTER)}
    copied = flow.merged - opened
    if Level.FLAT in copied:
        return 0
    device = 0 if Level.INTRA in copied else index[Level.INTRA]
    machine = 0 if Level.INTER in copied else index[Level.INTER]
    return machine * topology.devices + device


def encodings(program: Program, numel: int, topology: Topology, rank: int, root: int) -> list[Encoding]:
    """Every encoding of a program on rank ``rank``, of a unit of ``numel`` elements whose root is ``root``.

    The sum over all ranks of ``weight * residual``, each at its place, is what the mean has not been given yet.
    """
    flow, found = Flow(), []
    for step, following in zip(program, (*program[1:], None), strict=True):
        if isinstance(step, Encode):
            start, stop = piece_bounds(program, numel, flow, topology, rank)
            size = stop - start
            if isinstance(following, Hop):  # shard by shard, of which the first one is a full one, or all there is
                shard = replace(flow, opened=(*flow.opened, Opened(following.level, True)))
                size = piece_bounds(program, numel, shard, topology, 0)[1]
            start = start if has_part(flow, topology, rank, root) else stop
            opened = {each.level for each in flow.opened}
            copies = math.prod(topology.size(level) for level in flow.merged - opened)
            averaged = math.prod(topology.size(level) for level in flow.merged)
            found.append(Encoding(start, stop, averaged / topology.world_size / copies, copies, size))
        flow = advance(flow, step, topology, summable=True)
    return found


def sent_nbytes(step: Step, before: Data, after: Data, topology: Topology) -> float:
    """Bytes that a rank puts on the wire for ``step``, as a mean over all ranks; 0 for encode and decode.

    A reduced buffer travels twice around a ring, ``2 (N - 1) / N`` of it per rank; a gathered payload goes to every
    other rank; of ``N`` chunks or shards all but the own one are sent. To a root, and from it, all but the root's own
    travel. Ranks that have nothing, because a root has it, send nothing.

    Args:
        step: one step.
        before, after: what a rank that has something holds, before and after it.
        topology: of the ranks.
    """
    if isinstance(step, Encode | Decode):
        return 0.0
    ranks = topology.size(step.level)
    idle = [opened.level for opened in before.flow.opened if not opened.split and opened.level != step.level]
    share = 1 / math.prod(topology.size(level) for level in idle)
    match step:
        case AllReduce():
            return share * allreduce_sent_nbytes(before.nbytes, ranks)
        case ReduceScatter():
            return share * (ranks - 1) * after.nbytes
        case AllGather():
            return share * (ranks - 1) * before.nbytes
        case Hop():
            return share * after.nbytes
        case Reduce() | AllToAll() | Gather() | Broadcast():
            return share * before.nbytes * (ranks - 1) / ranks


def allreduce_sent_nbytes(nbytes: int, world_size: int) -> float:
    """Bytes that each rank sends in a ring allreduce of ``nbytes``."""
    return 2 * nbytes * (world_size - 1) / world_size
