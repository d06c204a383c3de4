"""Messages: units that travel together, and the stages that they go through.

The units of a *message* have the same program and lie side by side in one buffer, so that a phase needs one collective
however many units there are. Buffers are allocated once, when a message is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gckernels.batch import SEED_MASK
from gckernels.compressor import Compressor

from ..plans.plan import UnitPlan
from ..programs.sizes import allreduce_sent_nbytes
from ..programs.stages import IN_PLACE_STAGES, StageSpec
from ..resources.communicators import Communicators

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd: seeds of different steps of a unit differ


@dataclass(frozen=True)
class Unit:
    """One piece of gradient to synchronise: its plan and where it lies, ``[numel]``, contiguous."""

    plan: UnitPlan
    grad: torch.Tensor


def one_shot(unit: Unit, kind: str = "worker") -> Compressor:
    """The codec of an encoding of a unit; its program has been checked to take one."""
    codec = unit.plan.encoder(kind)
    assert isinstance(codec, Compressor)
    return codec


# -------------------------------------------------------------------- seeds


def unit_seed(*names: object) -> int:
    """A seed of 64 bits for these names; the same in a resumed process."""
    text = "/".join(map(str, names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_offset(step: int) -> int:
    """The number that a training step adds to the seed of every unit."""
    return step_seed(0, step)


def step_seed(seed: int, step: int) -> int:
    """The seed of a unit in a training step."""
    return (seed + step * _SEED_STRIDE) & SEED_MASK


def is_odd_step(offset: int) -> bool:
    """Whether the number of the step is odd that has this :func:`seed_offset`: the stride between steps is."""
    return offset % 2 == 1


# -------------------------------------------------------------------- stages


Work = Callable[[int], None]
"""Does a stage in a training step, the :func:`seed_offset` of which it is given."""


def regardless(call: Callable[[], object]) -> Work:
    """``call`` as the work of a stage, the same in every step."""

    def work(offset: int) -> None:
        call()

    return work


@dataclass(frozen=True)
class Stage:
    """One stage of a message, bound to its buffers.

    Attributes:
        spec: what it does, and the lane that it needs.
        work: does it.
        sent_nbytes: its part of the message's ``sent_nbytes``; 0 for computing and copies.
        elements: elements of the units that a rank has before it, or after it if it receives them.
        read_nbytes, written_nbytes: bytes of the units, raw or encoded, before and after it.
        begin: if the spec says that the stage starts at once: starts the work in the calling thread, and returns a
            function that waits for its end.
    """

    spec: StageSpec
    work: Work
    sent_nbytes: float = 0.0
    elements: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    begin: Callable[[], Callable[[], object]] | None = None


class Message:
    """Units that travel together.

    Attributes:
        keys: of the units.
        compressors: of the units, each once, by name.
        channel: of the communicators of its phases.
        sent_nbytes: bytes that a rank puts on the wire each time, as a mean over all ranks.
        stages: in order. The same on all ranks, but for those that this rank has no part in.
    """

    keys: Sequence[str]
    compressors: Sequence[str] = ()
    channel: int = 0
    sent_nbytes: float
    stages: Sequence[Stage]


def names_of(units: Sequence[Unit]) -> tuple[str, ...]:
    """The names of the compressors of units, each once."""
    return tuple(dict.fromkeys(unit.plan.compressor.name for unit in units))


class DenseMessage(Message):
    """A stretch of gradient that is averaged in place, as DDP itself would do it.

    Args:
        grad: the stretch.
        keys: of the units in it.
        communicators: of the ranks.
        shares: the stretch holds this rank's share of the mean: it has been divided by the number of ranks already.
    """

    def __init__(
        self, grad: torch.Tensor, keys: Sequence[str], communicators: Communicators, shares: bool = False
    ) -> None:
        self._grad, self.keys = grad, tuple(keys)
        self._group = communicators.averaging
        # DDP multiplies by it, too: the same bits come out
        self._factor = None if shares else 1.0 / communicators.world_size
        self.sent_nbytes = allreduce_sent_nbytes(grad.nbytes, communicators.world_size)
        (spec,) = IN_PLACE_STAGES
        sizes = grad.numel(), grad.nbytes, grad.nbytes
        self.stages = (Stage(spec, regardless(self._average), self.sent_nbytes, *sizes, begin=self._begin),)

    def _average(self) -> None:
        self._share()
        dist.all_reduce(self._grad, group=self._group)

    def _begin(self) -> Callable[[], object]:
        self._share()
        work: Any = dist.all_reduce(self._grad, group=self._group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def _share(self) -> None:
        if self._factor is not None:
            self._grad.mul_(self._factor)
