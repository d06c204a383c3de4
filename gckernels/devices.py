"""The differences between a CPU and an accelerator: when work is done, how to wait for it, and the names of devices.

No other module knows kinds of devices by their names. On an accelerator the host puts work onto *streams*: it is done
later, in order within a stream, and *events* put work of one stream behind that of another. On a CPU work is done when
the call returns. An accelerator is any device for which torch has a module (``torch.cuda``, for GPUs of AMD, too,
``torch.xpu``, or that of a device of somebody's own).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.futures import Future

ACCELERATOR_KEYS = ("CUDA", "XPU", "PrivateUse1")
"""The dispatcher's keys of accelerators; those of AMD have the first one, those of somebody's own the last one."""


def is_accelerator(device: torch.device) -> bool:
    """Whether work on a device is done later, in memory of its own. The device ``meta`` does no work."""
    return device.type not in ("cpu", "meta")


def device_here() -> torch.device:
    """The current accelerator of this process; the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


# -------------------------------------------------------------------- order of work


def current_stream(device: torch.device) -> torch.Stream:
    """The stream onto which this thread puts work on an accelerator."""
    stream: torch.Stream = _module(device).current_stream(device)
    return stream


def new_stream(device: torch.device) -> torch.Stream:
    """Another stream of an accelerator."""
    stream: torch.Stream = _module(device).Stream(device)
    return stream


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """A context in which this thread puts work onto ``stream``."""
    context: AbstractContextManager[object] = _module(stream.device).stream(stream)
    return context


def event_behind(stream: torch.Stream, is_timed: bool = False) -> torch.Event:
    """An event behind the work on ``stream``.

    A thread that waits for an event of CUDA sleeps instead of polling, unless the event is timed.

    Args:
        stream: the stream.
        is_timed: whether the event knows when it was reached, for ``elapsed_time``.
    """
    event: torch.Event
    if stream.device.type == "cuda":  # a torch.Event would poll
        event = torch.cuda.Event(enable_timing=is_timed, blocking=not is_timed)  # type: ignore[no-untyped-call]
    else:
        event = torch.Event(stream.device, enable_timing=is_timed)
    event.record(stream)
    return event


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's work on an accelerator is captured for a graph, and may wait for nothing outside it."""
    asked = getattr(_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def synchronize(device: torch.device) -> None:
    """Let the host wait until all work on a device is done. On a CPU it is."""
    if is_accelerator(device):
        _module(device).synchronize(device)


def used_here(*tensors: torch.Tensor | None) -> None:
    """Keep the memory of tensors until the current stream has done what it has been given so far, even if nobody keeps
    the tensors. It is for tensors that were made on another stream, to which their memory would go back at once."""
    for tensor in tensors:
        if tensor is not None and is_accelerator(tensor.device):
            tensor.record_stream(current_stream(tensor.device))


def future_on(device: torch.device) -> Future[Any]:
    """A future whose value is a tensor on a device.

    On an accelerator the stream that waits for the future waits for the work that was put onto the streams of the
    thread that sets the value, but only on devices of tensors in the value.
    """
    return Future(devices=[device] if is_accelerator(device) else None)


@contextlib.contextmanager
def profiler_range(device: torch.device, text: str) -> Iterator[None]:
    """A context that the profiler of the device's maker shows by a name; NVIDIA's alone, so far."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(text)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


# -------------------------------------------------------------------- what a device is


def name_of(device: torch.device) -> str:
    """The name of an accelerator's model, such as ``NVIDIA H100``."""
    return str(_module(device).get_device_name(device))


def architecture_of(device: torch.device) -> str:
    """The kind of machine code that an accelerator runs. Kernels of one source, by one compiler, give the same bits on
    all accelerators of a kind."""
    properties = _module(device).get_device_properties(device)
    if torch.version.hip:  # AMD's capabilities have the numbers of NVIDIA's
        return f"{properties.gcnArchName.partition(':')[0]} of AMD"
    if device.type == "cuda":
        return f"compute capability {properties.major}.{properties.minor} of NVIDIA"
    return f"{device.type} device {name_of(device)}"


def memory_nbytes(device: torch.device) -> int:
    """The bytes of memory of an accelerator."""
    return int(_module(device).get_device_properties(device).total_memory)


def cache_nbytes(device: torch.device) -> int | None:
    """The bytes of the largest cache of an accelerator; ``None`` if torch does not know them."""
    nbytes = getattr(_module(device).get_device_properties(device), "L2_cache_size", None)
    return None if nbytes is None else int(nbytes)


def allocated_nbytes(device: torch.device) -> tuple[int, int, int] | None:
    """The bytes of all tensors on an accelerator: now, at most so far, and at most ever. ``None`` if the allocator,
    which may be one of the user's, does not say."""
    module = _module(device)
    try:
        now, peak = module.memory_allocated(device), module.max_memory_allocated(device)
        free, _ = module.mem_get_info(device)
        return now, peak, module.memory_reserved(device) + free
    except (AttributeError, RuntimeError):
        return None
