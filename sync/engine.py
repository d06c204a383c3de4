"""The engine: runs messages through their programs on the lanes.

A *message* is what travels together: units with the same program, each in its place in one buffer, so that a phase
needs one collective however many units there are. Buffers are allocated once, when a message is built.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gckernels.compressor import Compressor, chunk_bounds

from .feedback import Feedback
from .lanes import Failed, Lanes, Token, Work
from .plan import UnitPlan
from .program import AllGather, AllReduce, AllToAll, Collective, Data, Decode, Encode, Program, sent_nbytes
from .program import trace as trace_program
from .topology import Communicators, all_gather

RECODE: Program = (Decode(), Encode())
_SEED_MASK = 2**63 - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd: seeds of different steps of a unit differ


@dataclass(frozen=True)
class Unit:
    """One piece of gradient to synchronise: its plan and where it lies, ``[numel]``, contiguous."""

    plan: UnitPlan
    grad: torch.Tensor


def one_shot(unit: Unit, kind: str = "worker") -> Compressor:
    """The codec of ``"worker"`` or ``"shard"`` of a unit of which the program has been checked to take one."""
    codec = unit.plan.encoder(kind)
    assert isinstance(codec, Compressor)
    return codec


def unit_seed(*what: object) -> int:
    """A seed of its own for whatever is named; the same in a resumed process."""
    text = "/".join(map(str, what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def step_seed(seed: int, step: int) -> int:
    """The seed of a step, from that of the unit."""
    return (seed + step * _SEED_STRIDE) & _SEED_MASK


def hold_unused(source: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Take the residual out of ``kept`` if ``source`` is all zero (decided on the device, never by the host)."""
    used = source.any()
    held = kept * used.logical_not()
    kept.mul_(used)
    return held


@dataclass(frozen=True)
class Stage:
    """What one lane does of a message: a collective, or the computing before or after it.

    Attributes:
        phase: number of collectives before this stage; which of the lanes of its kind it runs on.
        communicates: it is a collective.
        work: called with the number of the training step.
    """

    phase: int
    communicates: bool
    work: Callable[[int], None]


class Message:
    """Units that travel together."""

    sent_nbytes: float
    """Bytes that this rank puts on the wire each time."""
    stages: Sequence[Stage]
    """In order."""


class DenseMessage(Message):
    """A stretch of gradient that is averaged in place, as DDP itself would do it."""

    def __init__(self, grad: torch.Tensor, communicators: Communicators) -> None:
        self._grad = grad
        self._group = communicators.phases[0]
        self._factor = 1.0 / communicators.world_size  # DDP multiplies by it, too: the same bits come out
        data = Data(grad.numel(), False, False, 1, 1, False, grad.nbytes)
        self.sent_nbytes = sent_nbytes(AllReduce(), data, communicators.world_size)
        self.stages = (Stage(0, True, self._average),)

    def _average(self, step: int) -> None:
        dist.all_reduce(self._grad.mul_(self._factor), group=self._group)


class EncodedMessage(Message):
    """Units that are encoded, one after the other in one buffer.

    Args:
        program: of all units.
        units: with the same payload dtype where payloads are added.
        communicators: one process group for every collective of the program.
        feedback: where the residuals are kept.
        seed: of the stochastic compressors.
        keep_unused: a unit whose gradient is all zero takes nothing out of its residual. For models with parameters
            that a step may not use: DDP throws the result of a parameter away that no rank has used, and what the
            residuals gave to it would be lost. Costs one more pass over the gradient.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seed: int,
        keep_unused: bool,
    ) -> None:
        self.program = program
        self._units = tuple(units)
        self._communicators = communicators
        self._feedback = feedback
        self._seed = seed
        self._keep_unused = keep_unused
        world_size = communicators.world_size
        self._states = tuple(
            trace_program(program, unit.grad.numel(), unit.grad.dtype, unit.plan.compressor, world_size)
            for unit in self._units
        )
        self.sent_nbytes = sum(
            sent_nbytes(step, states[index], world_size)
            for states in self._states
            for index, step in enumerate(program)
        )
        self.stages = self._bind()

    def _bind(self) -> list[Stage]:
        """Allocate every buffer and tie each step to those it reads and writes."""
        stages: list[Stage] = []
        raw = [unit.grad for unit in self._units]
        buffer = torch.empty(0)
        kind, phase = "worker", 0
        for index, step in enumerate(self.program):
            before = [states[index] for states in self._states]
            after = [states[index + 1] for states in self._states]
            match step:
                case Encode():
                    received = buffer
                    buffer, places = self._buffer(after)
                    if self._recodes(index):
                        before = [states[index - 1] for states in self._states]
                        work = self._recode(self._places(received, before), places, before)
                    else:
                        work = self._encode(kind, raw, places, before, self._encode_scale(index))
                    stages.append(Stage(phase, False, work))
                    kind = "shard"
                case Decode():
                    if self._recodes(index + 1):
                        continue
                    places = self._places(buffer, before)
                    raw = [self._target(unit, data) for unit, data in zip(self._units, after, strict=True)]
                    # the step that makes a sum of all ranks' payloads makes their mean
                    scale = 1.0 if before[0].reduced else 1.0 / self._communicators.world_size
                    stages.append(Stage(phase, False, self._decode(places, raw, before, scale)))
                case _:
                    buffer, work = self._communicate(step, buffer, phase)
                    stages.append(Stage(phase, True, work))
                    phase += 1
        return stages

    def _recodes(self, index: int) -> bool:
        """Whether step ``index`` encodes what the step before it has decoded, which is then done in one call. Not
        where an unused unit must be found out, for which the decoded values are needed."""
        return 0 < index < len(self.program) and not self._keep_unused and self.program[index - 1 : index + 1] == RECODE

    # ---------------------------------------------------------------- buffers

    def _buffer(self, encoded: Sequence[Data]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A buffer ``[chunks, nbytes]`` for one payload of every unit and chunk, and the units' places in it."""
        chunks = encoded[0].chunks
        nbytes = sum(data.nbytes // data.chunks for data in encoded)
        buffer = torch.zeros(chunks, nbytes, dtype=torch.uint8, device=self._units[0].grad.device)
        return buffer, [place[0] for place in self._places(buffer, encoded)]

    @staticmethod
    def _places(buffer: torch.Tensor, encoded: Sequence[Data]) -> list[torch.Tensor]:
        """Each unit's payloads in ``buffer [sources * chunks, nbytes]``, as ``[sources, chunks, payload_nbytes]``."""
        places, offset = [], 0
        for data in encoded:
            copies = data.sources * data.chunks
            nbytes = data.nbytes // copies
            place = buffer[:, offset : offset + nbytes]
            places.append(place.unflatten(0, (data.sources, data.chunks)))  # type: ignore[no-untyped-call]
            offset += nbytes
        return places

    def _target(self, unit: Unit, decoded: Data) -> torch.Tensor:
        """Where a unit is decoded to: its gradient, or an fp32 buffer for the shard that this rank owns."""
        if not decoded.sharded:
            return unit.grad
        first, last = chunk_bounds(unit.grad.numel(), decoded.numel, self._communicators.rank)
        return torch.zeros(last - first, dtype=torch.float32, device=unit.grad.device)

    # ---------------------------------------------------------------- steps

    def _encode_scale(self, index: int) -> float:
        """Payloads that will be added are scaled before, so that 16-bit sums stay in range."""
        following = next(step for step in self.program[index:] if isinstance(step, Collective))
        return 1.0 / self._communicators.world_size if isinstance(following, AllReduce) else 1.0

    def _encode(
        self,
        kind: str,
        raw: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        before: Sequence[Data],
        scale: float,
    ) -> Callable[[int], None]:
        calls = []
        for unit, source, place, data in zip(self._units, raw, places, before, strict=True):
            kept = self._residual(kind, unit, source.numel())
            # every payload is laid out for a full shard, the short last one's too
            size = data.numel if data.sharded else None
            calls.append((one_shot(unit, kind), source, kept, place, self._unit_seed(kind, unit), size))

        def work(step: int) -> None:
            for compressor, source, kept, place, seed_of_unit, size in calls:
                seed = step_seed(seed_of_unit, step)
                held = hold_unused(source, kept) if self._keep_unused and kept is not None else None
                compressor.encode(source, kept, place, seed, scale, size)
                if held is not None and kept is not None:
                    kept.add_(held)

        return work

    def _recode(
        self, sources: Sequence[torch.Tensor], places: Sequence[torch.Tensor], before: Sequence[Data]
    ) -> Callable[[int], None]:
        calls = []
        for unit, source, place, data in zip(self._units, sources, places, before, strict=True):
            first, last = chunk_bounds(unit.grad.numel(), data.numel, self._communicators.rank)
            numel = last - first
            kept = self._residual("shard", unit, numel)
            calls.append(
                (one_shot(unit), source[:, 0], kept, place[0], numel, self._unit_seed("shard", unit), data.numel)
            )
        scale = 1.0 / self._communicators.world_size

        def work(step: int) -> None:
            for compressor, source, kept, place, numel, seed_of_unit, size in calls:
                seed = step_seed(seed_of_unit, step)
                compressor.recode(source, kept, place, numel, scale, seed, size)

        return work

    def _residual(self, kind: str, unit: Unit, numel: int) -> torch.Tensor | None:
        if not unit.plan.remembers(kind):
            return None
        return self._feedback.residual(kind, unit.plan.parameter, unit.plan.encoder(kind).states * numel)

    def _unit_seed(self, kind: str, unit: Unit) -> int:
        """A seed of its own for every unit, rank and encoding. All ranks have one seed for payloads that add up, which
        have to mean the same."""
        rank = "all" if unit.plan.compressor.summable else self._communicators.rank
        return unit_seed(self._seed, kind, rank, unit.plan.parameter)

    def _decode(
        self,
        places: Sequence[torch.Tensor],
        raw: Sequence[torch.Tensor],
        before: Sequence[Data],
        scale: float,
    ) -> Callable[[int], None]:
        calls = [
            (one_shot(unit), place, target, data.numel if data.sharded else None)
            for unit, place, target, data in zip(self._units, places, raw, before, strict=True)
        ]

        def work(step: int) -> None:
            for compressor, place, target, size in calls:
                compressor.decode(place, target, scale, False, size)

        return work

    def _communicate(
        self, step: object, buffer: torch.Tensor, phase: int
    ) -> tuple[torch.Tensor, Callable[[int], None]]:
        group, world_size = self._communicators.phases[phase], self._communicators.world_size
        match step:
            case AllReduce():
                numbers = buffer.view(self._units[0].plan.compressor.payload_dtype)
                return buffer, lambda _: dist.all_reduce(numbers, group=group)
            case AllGather():
                received = buffer.new_zeros(world_size, buffer.shape[1])
                return received, lambda _: all_gather(received.view(-1), buffer[0], group=group)
            case AllToAll():
                received = torch.zeros_like(buffer)
                return received, lambda _: dist.all_to_all_single(received, buffer, group=group)
        raise AssertionError(f"no such collective: {step}")


class Engine:
    """Submits messages to the lanes. One thread submits, in the same order on every rank.

    Args:
        device: of the gradients.
        communicators: one process group per phase.
    """

    def __init__(self, device: torch.device, communicators: Communicators) -> None:
        self.communicators = communicators
        self.lanes = Lanes(device, len(communicators.phases))

    def submit(self, message: Message, step: int, after: Token) -> Token:
        """Queue all steps of ``message`` for training step ``step``; never blocks. The token is that of the last."""
        token = after
        for stage in message.stages:
            lanes = self.lanes.communicate if stage.communicates else self.lanes.compute
            token = lanes[stage.phase].submit(functools.partial(stage.work, step), (token,))
        return token

    def finish(self, tokens: Sequence[Token], work: Work, failed: Failed) -> None:
        """Queue ``work`` behind ``tokens``; ``failed`` is told the first error when there was one."""
        self.lanes.compute[-1].submit(work, tokens, failed)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane; nothing runs after it."""
        return self.lanes.failure.error

    def close(self) -> None:
        """Finish what is queued, end the lanes, destroy the communicators; further calls do nothing."""
        self.lanes.close()
        self.communicators.close()
