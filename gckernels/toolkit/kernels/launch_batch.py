"""Batches of units that are launched one by one, with the launches determined once, when units are bound.

The Python code of a launcher, such as looking up the fields of a payload, takes longer than its launches, and the
tensors of a bound unit keep their addresses. So the launcher is recorded once, and the recorded launches are repeated
in every step. Temporaries are not kept for every unit: they are parts of memory that all bound units of a stream share,
one after the other.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...codec import SEED_MASK, Backend, Decoding, Encoding, Recoding, Work
from ...devices import current_stream, is_accelerator
from ..payload import round_up
from .launch import BoundLaunch, Launch, record_launches

ALIGN_NBYTES = 512  # torch's alignment on CUDA; 16 would be enough


class LaunchBackend(Backend):
    """A back end whose ``encode``, ``decode`` and ``recode`` only launch kernels.

    They must allocate memory only by :func:`~gckernels.toolkit.kernels.launch.temporary`.
    """

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return self.repeated([self.record_encode(unit, scale) for unit in units], added)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        return self.repeated([self.record_decode(unit, scale, accumulate) for unit in units])

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return self.repeated([self.record_recode(unit, scale) for unit in units], added)

    def repeated(self, units: Sequence[RecordedLaunches], added: torch.Tensor | None = None) -> Repeated:
        """A function that repeats the launches of units, whose seeds are increased by the number in ``added``."""
        return Repeated([RepeatedUnit(unit, added) for unit in units])

    def record_encode(self, unit: Encoding, scale: float) -> RecordedLaunches:
        """The launches of ``encode``."""
        return _recorded(self.encode, _masked(unit), unit.size * unit.payload.shape[0], scale)

    def record_decode(self, unit: Decoding, scale: float, accumulate: bool) -> RecordedLaunches:
        """The launches of ``decode``."""
        return _recorded(self.decode, unit, unit.size * unit.payloads.shape[1], scale, accumulate)

    def record_recode(self, unit: Recoding, scale: float) -> RecordedLaunches:
        """The launches of ``recode``."""
        return _recorded(self.recode, _masked(unit), unit.size, scale)


def _masked(unit: Any) -> Any:
    """The unit with its seed modulo 2**63, as bound units use it."""
    return dataclasses.replace(unit, seed=unit.seed & SEED_MASK)


@dataclass(frozen=True)
class RecordedLaunches:
    """The recorded launches of a launcher for a unit.

    Attributes:
        launches: the launches, with temporaries that will be elsewhere.
        temporaries: each with whether it must be zeroed.
        device: where the unit is.
        numel: number of elements that the unit's payloads have room for.
    """

    launches: Sequence[Launch]
    temporaries: Sequence[tuple[torch.Tensor, bool]]
    device: torch.device
    numel: int = 0


class Repeatable(Protocol):
    """Launches that can be repeated, with ``nbytes`` of temporaries."""

    nbytes: int
    device: torch.device

    def use(self, memory: torch.Tensor) -> None:
        """Put the temporaries into ``memory`` from now on."""

    def run(self) -> None:
        """Launch everything."""


class Repeated:
    """The launches of units, one after the other; temporaries share memory."""

    def __init__(self, units: Sequence[Repeatable]) -> None:
        self._units = units
        self._nbytes = max((unit.nbytes for unit in units), default=0)
        self._memory: torch.Tensor | None = None

    def __call__(self) -> None:
        if self._nbytes:
            memory = _shared(self._nbytes, self._units[0].device)
            if memory is not self._memory:
                self._memory = memory
                for unit in self._units:
                    unit.use(memory)
        for unit in self._units:
            unit.run()


class Temporaries:
    """The places of recorded temporaries in the memory that they share; zeroed ones come first.

    Attributes:
        nbytes: size of all.
        zeroed_nbytes: size of those that are zeroed before the launches.
    """

    def __init__(self, recorded: Iterable[tuple[torch.Tensor, bool]]) -> None:
        self._places: dict[int, tuple[torch.Tensor, int]] = {}  # by address of their storage
        self.nbytes = self.zeroed_nbytes = 0
        for tensor, zeroed in sorted(recorded, key=lambda each: not each[1]):
            self._places[_storage(tensor)] = tensor, self.nbytes
            self.nbytes += round_up(tensor.nbytes, ALIGN_NBYTES)
            self.zeroed_nbytes = self.nbytes if zeroed else self.zeroed_nbytes

    def first_byte(self, argument: torch.Tensor) -> int | None:
        """Where ``argument``, a temporary or a part of one, begins; None for other tensors."""
        found = self._places.get(_storage(argument))
        return None if found is None else found[1] + argument.data_ptr() - found[0].data_ptr()

    def moved(self, argument: Any, memory: torch.Tensor) -> Any:
        """The part of ``memory`` in place of a temporary; any other argument itself."""
        first = self.first_byte(argument) if isinstance(argument, torch.Tensor) else None
        return argument if first is None else memory[first : first + argument.nbytes].view(argument.dtype)

    def zeroed(self, memory: torch.Tensor) -> torch.Tensor | None:
        """The part of ``memory`` that is zeroed before the launches, if there is one."""
        return memory[: self.zeroed_nbytes] if self.zeroed_nbytes else None


class RepeatedUnit:
    """The launches of one unit, whose seed is offset by ``added``."""

    def __init__(self, recorded: RecordedLaunches, added: torch.Tensor | None = None) -> None:
        self._temporaries = Temporaries(recorded.temporaries)
        self.nbytes, self.device = self._temporaries.nbytes, recorded.device
        launches = [launch.adding(added) for launch in recorded.launches]
        self._launches = [(launch, BoundLaunch(launch)) for launch in launches]
        self._zeroed: torch.Tensor | None = None

    def use(self, memory: torch.Tensor) -> None:
        self._zeroed = self._temporaries.zeroed(memory)
        for launch, bound in self._launches:
            bound.use(tuple(self._temporaries.moved(argument, memory) for argument in launch.args))

    def run(self) -> None:
        if self._zeroed is not None:
            self._zeroed.zero_()
        for _, bound in self._launches:
            bound()


def bind_launcher(launcher: Callable[[], None], device: torch.device) -> Work:
    """A function that repeats what ``launcher`` launches on ``device``.

    The launcher must allocate memory only by :func:`~gckernels.toolkit.kernels.launch.temporary`, except for tables,
    which stay as they are.
    """
    with record_launches() as recording:
        launcher()
    return Repeated([RepeatedUnit(RecordedLaunches(recording, recording.temporaries, device))])


def _recorded(launcher: Callable[..., None], unit: Any, numel: int, *arguments: Any) -> RecordedLaunches:
    """The launches that ``launcher`` makes for ``unit``."""
    with record_launches() as recording:
        launcher(unit, *arguments)
    fields = [getattr(unit, field.name) for field in dataclasses.fields(unit)]
    tensors = [value for value in fields if isinstance(value, torch.Tensor)]
    known = {_storage(tensor) for tensor in (*tensors, *(each for each, _ in recording.temporaries))}
    used = {_storage(each) for launch in recording for each in launch.args if isinstance(each, torch.Tensor)}
    assert used <= known | {0}, f"{launcher} has allocated memory that is not a temporary"
    return RecordedLaunches(recording, recording.temporaries, tensors[0].device, numel)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.memory: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()


_of_thread = _OfThread()


def _shared(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of at least ``nbytes`` for this thread and the current stream; all bound units there share and keep it."""
    stream = current_stream(device).stream_id if is_accelerator(device) else 0
    memory = _of_thread.memory.get((device, stream))
    if memory is None or memory.numel() < nbytes:
        memory = _of_thread.memory[device, stream] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory
