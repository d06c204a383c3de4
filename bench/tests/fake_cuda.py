"""A fake GPU for rehearsals: the part of ``torch.cuda`` that the benchmarks use, on the CPU.

Tensors of the device ``cuda`` are created on the CPU. A graph runs its calls while it is captured and does nothing when
it is replayed. Calls that CUDA forbids during a capture raise errors here as well, and a capture that fails leaves its
stream the current one, as in torch. The mode in which torch refuses waiting concerns streams here, not tensors.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

L2_NBYTES, FREE_NBYTES = 2**16, 2**31

_capturing = False
_sync_debug_mode: int | str = 0


def _forbidden_in_a_capture(name: str) -> None:
    if _capturing:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name}")


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timed = enable_timing

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def synchronize(self) -> None:
        _forbidden_in_a_capture("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        assert self._timed and end._timed, "an event without a clock"
        return max((end._recorded - self._recorded) * 1e3, 1e-3)


class Stream:
    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        _forbidden_in_a_capture("Stream.synchronize")
        if _sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


class CUDAGraph:
    def __init__(self) -> None:
        self.captured = False

    def replay(self) -> None:
        assert self.captured, "a graph that was not captured"


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None):
    global _capturing
    _forbidden_in_a_capture("graph")
    _capturing, before = True, _current
    set_stream(stream or Stream())
    try:
        yield
        cuda_graph.captured = True
        set_stream(before)
    finally:
        _capturing = False


@contextlib.contextmanager
def stream(stream: Stream):
    before = _current
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def set_stream(stream: Stream) -> None:
    global _current
    assert isinstance(stream, Stream)
    _current = stream


def set_sync_debug_mode(mode: int | str) -> None:
    global _sync_debug_mode
    _sync_debug_mode = mode


def synchronize(device: Any = None) -> None:
    _forbidden_in_a_capture("synchronize")


def clock_rate(device: Any = None) -> int:
    return 1980


_current = Stream()
_PROPERTIES = SimpleNamespace(name="Rehearsal", major=9, minor=0, multi_processor_count=1)
_PROPERTIES.L2_cache_size, _PROPERTIES.total_memory = L2_NBYTES, 2**30
REPLACED: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "stream": stream,
    "set_stream": set_stream,
    "set_sync_debug_mode": set_sync_debug_mode,
    "get_sync_debug_mode": lambda: _sync_debug_mode,
    "synchronize": synchronize,
    "clock_rate": clock_rate,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: _current,
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "mem_get_info": lambda device=None: (FREE_NBYTES, 2 * FREE_NBYTES),
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
}
"""Replacements for functions and classes of ``torch.cuda``, by name."""


class OnTheCpu(TorchFunctionMode):
    """Mode in which tensors created on, or moved to, the device ``cuda`` are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        moved = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(_cpu, args), **moved)


def _cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


@contextlib.contextmanager
def installed():
    """Install the fake GPU for the duration of a ``with`` block."""
    missing = [name for name in REPLACED if not hasattr(torch.cuda, name)]
    assert not missing, f"torch.cuda has no {missing}"
    with mock.patch.multiple(torch.cuda, **REPLACED), OnTheCpu():
        yield
