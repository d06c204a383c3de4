"""Units that are launched one by one: which launches these are is found out when they are bound, and not in every step.

What a launcher does in Python, such as asking for the fields of a payload, takes longer than its launches, and the
tensors of a bound unit stay where they are. So the launcher is recorded instead of run, and what it would have launched
is repeated in every step. Its temporaries are not kept, of which every unit would have its own: they are places in
memory that all works of a stream share, one after the other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import SEED_MASK, Batch, Seeded, Unseeded
from ...compressor import Decoding, Encoding, Recoding
from ..payload import round_up
from .launch import BoundLaunch, Launch, record_launches

ALIGN_NBYTES = 512  # as torch aligns memory on CUDA; 16 would do


class LaunchBatch(Batch):
    """Units of a compressor whose ``encode_triton``, ``decode_triton`` and ``recode_triton`` do nothing but launch, and
    have no other memory of their own than :func:`~gckernels.toolkit.kernels.launch.temporary`."""

    def bind_encodes(self, units: Sequence[Encoding], scale: float) -> Seeded:
        encode = self.compressor.encode_triton
        return _Repeated(
            [
                _recorded(encode, unit.seed, unit.grad, unit.residual, unit.payload, unit.size, 0, scale)
                for unit in units
            ]
        )

    def bind_decodes(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Unseeded:
        decode = self.compressor.decode_triton
        return _Repeated(
            [_recorded(decode, 0, unit.payloads, unit.out, unit.size, scale, accumulate) for unit in units]
        )

    def bind_recodes(self, units: Sequence[Recoding], scale: float) -> Seeded:
        recode = self.compressor.recode_triton
        return _Repeated(
            [
                _recorded(
                    *(recode, unit.seed, unit.payloads, unit.residual, unit.payload, unit.numel, unit.size, scale, 0)
                )
                for unit in units
            ]
        )


class _Repeated:
    """The launches of units, one unit after the other; in each, what is given is added to the seed."""

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
    """A place in the memory for temporaries."""

    tensor: torch.Tensor  # in whose place it is
    first: int

    def view(self, argument: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The part of the place that an argument of a launch is of the tensor."""
        first = self.first + argument.data_ptr() - self.tensor.data_ptr()
        return memory[first : first + argument.nbytes].view(argument.dtype)


class _Unit:
    """The launches of a unit."""

    def __init__(
        self,
        launches: Sequence[Launch],
        temporaries: dict[int, _Temporary],  # by the address of their storage
        zeroed_nbytes: int,  # of the first of them
        nbytes: int,  # of all
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
        """Have the temporaries in ``memory`` from now on."""
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


def _recorded(launcher: Callable[..., None], seed: int, *arguments: Any) -> _Unit:
    """The launches that the launcher makes with these arguments, of which a seed is 0."""
    with record_launches() as recording:
        launcher(*arguments)
    temporaries, nbytes, zeroed_nbytes = {}, 0, 0
    for tensor, zeroed in sorted(recording.temporaries, key=lambda each: not each[1]):
        temporaries[_storage(tensor)] = _Temporary(tensor, nbytes)
        nbytes += round_up(tensor.nbytes, ALIGN_NBYTES)
        zeroed_nbytes = nbytes if zeroed else zeroed_nbytes
    given = {_storage(each) for each in arguments if isinstance(each, torch.Tensor)}
    used = {_storage(each) for launch in recording for each in launch.args if isinstance(each, torch.Tensor)}
    assert used <= given | temporaries.keys() | {0}, f"{launcher} has memory that is no temporary"
    return _Unit(list(recording), temporaries, zeroed_nbytes, nbytes, seed, arguments[0].device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.memory: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()


_of_thread = _OfThread()


def _shared(nbytes: int, device: torch.device) -> torch.Tensor:
    """At least ``nbytes`` that all works share which this thread puts on this stream; for as long as one is there."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    memory = _of_thread.memory.get((device, stream))
    if memory is None or memory.numel() < nbytes:
        memory = _of_thread.memory[device, stream] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory
