"""``torch.sim``: the module that torch has for each kind of device, as ``torch.cuda`` for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .build import load

torch.utils.rename_privateuse1_backend("sim")  # type: ignore[attr-defined]
compiled = load()

Event = torch.Event
_NBYTES = 1 << 34


class Stream(torch.Stream):
    """A stream, new unless it is described by numbers."""

    def __new__(cls, device: Any = None, priority: int = 0, **numbers: int) -> Stream:
        where = torch.device("sim", _index(device))
        return super().__new__(cls, **numbers) if numbers else super().__new__(cls, where)


def _index(device: Any) -> int:
    if device is None:
        return int(compiled.current_device())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(compiled.current_device()) if index is None else index


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(stream_id=index, device_index=index, device_type=compiled.DEVICE_TYPE)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    with contextlib.nullcontext() if stream is None else stream:
        yield


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    compiled.synchronize(_index(device))


def current_device() -> int:
    return int(compiled.current_device())


def set_device(device: Any) -> None:
    compiled.set_device(_index(device))


def device_count() -> int:
    return int(compiled.DEVICES)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def is_current_stream_capturing() -> bool:
    return False


def graph(*_: Any, **__: Any) -> None:
    raise RuntimeError("the simulated device captures no graphs")


# the arguments of what the host does for the device


def tensors_in(given: Any) -> list[torch.Tensor]:
    """The tensors in an argument, or in a list of arguments and lists of them, in order."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for each in given for tensor in tensors_in(each)] if isinstance(given, list | tuple) else []


def on_host(given: Any) -> Any:
    """The same argument with its tensors as those of the CPU, in the same memory."""
    if isinstance(given, torch.Tensor):
        return compiled.on_host(given)
    return [on_host(each) for each in given] if isinstance(given, list | tuple) else given


# random numbers are the host's, so that a training has the same ones as on the CPU


def manual_seed(seed: int) -> None:
    pass


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


# descriptions


def get_device_name(device: Any = None) -> str:
    return "simulated"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="simulated", total_memory=_NBYTES, L2_cache_size=1 << 20)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def memory_allocated(device: Any = None) -> int:
    return int(compiled.taken_nbytes())


max_memory_allocated = memory_reserved = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _NBYTES - memory_allocated(), _NBYTES
