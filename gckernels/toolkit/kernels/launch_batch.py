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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compressor import SEED_MASK, Backend, Decoding, Encoding, Recoding, Seeded, Unseeded
from ..payload import round_up
from .launch import BoundLaunch, Launch, Recording, record_launches

ALIGN_NBYTES = 512  # torch's alignment on CUDA; 16 would be enough


class LaunchBackend(Backend):
    """A back end whose ``encode``, ``decode`` and ``recode`` only launch kernels.

    They must allocate memory only by :func:`~gckernels.toolkit.kernels.launch.temporary`.
    """

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0) -> Seeded:
        return _Repeated([_recorded(self.encode, _unseeded(unit), unit.seed, scale) for unit in units])

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Unseeded:
        return _Repeated([_recorded(self.decode, unit, 0, scale, accumulate) for unit in units])

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0) -> Seeded:
        return _Repeated([_recorded(self.recode, _unseeded(unit), unit.seed, scale) for unit in units])


def _unseeded(unit: Any) -> Any:
    return dataclasses.replace(unit, seed=0)


class _Repeated:
    """The launches of units, one unit after the other, with ``added`` added to every seed."""

    def __init__(self, units: Sequence[_Unit]) -> None:
        self._units = units
        self._nbytes = max((unit.nbytes for unit in units), default=0)
        self._memory: torch.Tensor | None = None

    def __call__(self, added: int = 0) -> None:
        if self._nbytes:
            memory = _shared(self._nbytes, self._units[0].device)
            if memory is not self._memory:
                self._memory = memory
                for unit in self._units:
                    unit.use(memory)
        for unit in self._units:
            unit.run(added)


@dataclass(frozen=True)
class _Temporary:
    """A region, starting at byte ``first``, of the memory for temporaries, in place of the recorded ``tensor``."""

    tensor: torch.Tensor
    first: int

    def view(self, argument: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The part of ``memory`` in place of ``argument``, which is ``tensor`` or a part of it."""
        first = self.first + argument.data_ptr() - self.tensor.data_ptr()
        return memory[first : first + argument.nbytes].view(argument.dtype)


class _Unit:
    """The launches of a unit."""

    def __init__(
        self,
        launches: Sequence[Launch],
        temporaries: dict[int, _Temporary],  # by address of their storage
        zeroed_nbytes: int,  # size of the temporaries that need zeros, which come first
        nbytes: int,  # size of all temporaries
        seed: int,
        device: torch.device,
    ) -> None:
        self.nbytes, self.device = nbytes, device
        self._seed, self._temporaries, self._zeroed_nbytes = seed, temporaries, zeroed_nbytes
        self._launches = [
            (launch, BoundLaunch(launch, "seed" if "seed" in launch.names else None), "seed" in launch.names)
            for launch in launches
        ]
        self._zeroed: torch.Tensor | None = None

    def use(self, memory: torch.Tensor) -> None:
        """Put the temporaries into ``memory`` from now on."""
        self._zeroed = memory[: self._zeroed_nbytes] if self._zeroed_nbytes else None
        for launch, bound, _ in self._launches:
            bound.use(tuple(self._moved(argument, memory) for argument in launch.args))

    def _moved(self, argument: Any, memory: torch.Tensor) -> Any:
        place = self._temporaries.get(_storage(argument)) if isinstance(argument, torch.Tensor) else None
        return argument if place is None else place.view(argument, memory)

    def run(self, added: int) -> None:
        if self._zeroed is not None:
            self._zeroed.zero_()
        seed = (self._seed + added) & SEED_MASK
        for _, bound, seeded in self._launches:
            bound(seed) if seeded else bound()


def bind_launcher(launcher: Callable[[], None], device: torch.device) -> Callable[..., None]:
    """A function that repeats what ``launcher`` launches on ``device``; its argument, by default 0, replaces ``seed``.

    The launcher must allocate memory only by :func:`~gckernels.toolkit.kernels.launch.temporary`, except for tables,
    which stay as they are.
    """
    with record_launches() as recording:
        launcher()
    return _Repeated([_unit(recording, 0, device)])


def _recorded(launcher: Callable[..., None], unit: Any, seed: int, *arguments: Any) -> _Unit:
    """The launches that ``launcher`` makes for ``unit``, whose seed is 0 and will be ``seed``."""
    with record_launches() as recording:
        launcher(unit, *arguments)
    fields = [getattr(unit, field.name) for field in dataclasses.fields(unit)]
    tensors = [value for value in fields if isinstance(value, torch.Tensor)]
    known = {_storage(tensor) for tensor in (*tensors, *(each for each, _ in recording.temporaries))}
    used = {_storage(each) for launch in recording for each in launch.args if isinstance(each, torch.Tensor)}
    assert used <= known | {0}, f"{launcher} has allocated memory that is not a temporary"
    return _unit(recording, seed, tensors[0].device)


def _unit(recording: Recording, seed: int, device: torch.device) -> _Unit:
    temporaries, nbytes, zeroed_nbytes = {}, 0, 0
    for tensor, zeroed in sorted(recording.temporaries, key=lambda each: not each[1]):
        temporaries[_storage(tensor)] = _Temporary(tensor, nbytes)
        nbytes += round_up(tensor.nbytes, ALIGN_NBYTES)
        zeroed_nbytes = nbytes if zeroed else zeroed_nbytes
    return _Unit(list(recording), temporaries, zeroed_nbytes, nbytes, seed, device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.memory: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()


_of_thread = _OfThread()


def _shared(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of at least ``nbytes`` for this thread and the current stream; all bound units there share and keep it."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    memory = _of_thread.memory.get((device, stream))
    if memory is None or memory.numel() < nbytes:
        memory = _of_thread.memory[device, stream] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory
