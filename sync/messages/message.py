"""Messages: units that travel together, and the stages that they go through.

A *message* is what travels together: units with the same program, each in its place in one buffer, so that a phase
needs one collective however many units there are. Buffers are allocated once, when a message is built.
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
from ..resources.communicators import Communicators
from ..resources.lanes import Resource

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd: seeds of different steps of a unit differ


@dataclass(frozen=True)
class Unit:
    """One piece of gradient to synchronise: its plan and where it lies, ``[numel]``, contiguous."""

    plan: UnitPlan
    grad: torch.Tensor


def one_shot(unit: Unit, kind: str = "worker") -> Compressor:
    """The codec of an encoding of a unit of which the program has been checked to take one."""
    codec = unit.plan.encoder(kind)
    assert isinstance(codec, Compressor)
    return codec


def unit_seed(*what: object) -> int:
    """A seed of its own for whatever is named; the same in a resumed process."""
    text = "/".join(map(str, what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def step_seed(seed: int, step: int) -> int:
    """The seed of a step, from that of the unit."""
    return (seed + step * _SEED_STRIDE) & SEED_MASK


def hold_unused(source: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Take the residual out of ``kept`` if ``source`` is all zero (decided on the device, never by the host)."""
    used = source.any()
    held = kept * used.logical_not()
    kept.mul_(used)
    return held


Work = Callable[[int], None]
"""Called with the number of the training step."""


@dataclass(frozen=True)
class Stage:
    """What one lane does of a message: a collective, the computing before or after it, or a copy between places.

    Attributes:
        phase: number of collectives before this stage; which of the lanes of its kind it runs on.
        resource: that kind.
        work: what it does.
        name: what kind of step it is, ``"Encode"`` or ``"AllToAll(inter)"``.
        nbytes: its part of the message's ``sent_nbytes``; 0 for computing and copies.
        begin: where lanes are threads, and nothing comes before the stage: begins the work without waiting for it, in
            the thread that submits, and returns what waits, for the lane.
    """

    phase: int
    resource: Resource
    work: Work
    name: str
    nbytes: float = 0.0
    begin: Callable[[], Callable[[], object]] | None = None


class Message:
    """Units that travel together."""

    keys: Sequence[str]
    """Of the units."""
    channel: int = 0
    """Of the communicators of its phases."""
    sent_nbytes: float
    """Bytes that a rank puts on the wire each time, as a mean over all ranks."""
    stages: Sequence[Stage]
    """In order. The same on all ranks, but for those that this rank has no part in."""


class DenseMessage(Message):
    """A stretch of gradient that is averaged in place, as DDP itself would do it.

    Args:
        grad: the stretch.
        keys: of the units in it.
        communicators: of the ranks.
        shares: what lies there is this rank's share of the mean, divided by the number of ranks already.
    """

    def __init__(
        self, grad: torch.Tensor, keys: Sequence[str], communicators: Communicators, shares: bool = False
    ) -> None:
        self._grad, self.keys = grad, tuple(keys)
        self._group = communicators.averaging
        # DDP multiplies by it, too: the same bits come out
        self._factor = None if shares else 1.0 / communicators.world_size
        self.sent_nbytes = allreduce_sent_nbytes(grad.nbytes, communicators.world_size)
        self.stages = (Stage(0, Resource.AVERAGE, self._average, "Average", self.sent_nbytes, self._begin),)

    def _average(self, step: int) -> None:
        self._share()
        dist.all_reduce(self._grad, group=self._group)

    def _begin(self) -> Callable[[], object]:
        self._share()
        work: Any = dist.all_reduce(self._grad, group=self._group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def _share(self) -> None:
        if self._factor is not None:
            self._grad.mul_(self._factor)
