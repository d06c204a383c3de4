"""Launching of kernels, in one place, so that launches can be recorded instead of run, and bound.

Ahead-of-time compilation needs every kernel in every shipped configuration. Instead of a list kept by hand, the
launchers themselves run under :func:`record_launches`, and the recorded launches are compiled. A launch that is
repeated in every step with the same tensors is a :class:`BoundLaunch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of every launch.

``enable_fp_fusion`` is off, because a contracted multiply-add would round residuals and merged values differently from
the reference. The kernels are limited by memory bandwidth and do not get slower.
"""


ADDED = "added_ptr"
"""Name of the argument of a kernel that points to what is added to its seed."""
OPTIONAL = ("place", ADDED)
"""Names of arguments behind a kernel's compile-time ones, None by default."""

BACKEND = "hip" if torch.version.hip else "cuda"
"""Triton's backend for the GPUs that this build of torch supports."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: the Triton function.
        grid: number of programs along each axis.
        args: positional arguments.
        constexprs: constexpr arguments by name; with them what is added to the seed, None or a tensor.
        num_warps: warps per program.
        maxnreg: maximum number of registers per thread on an NVIDIA GPU. By default ptxas chooses; in kernels with
            nested loops it prefers spilling one or two values to losing occupancy.
        shared_maxnreg: the same of the launch that units share (``sharing.py``), by default ``maxnreg``.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int = 4
    maxnreg: int | None = None
    shared_maxnreg: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options on this machine."""
        return self.options_for(BACKEND)

    def options_for(self, backend: str) -> dict[str, Any]:
        """Compiler options on the backend ``"cuda"`` or ``"hip"``."""
        limit = {"maxnreg": self.maxnreg} if self.maxnreg is not None and backend == "cuda" else {}
        return OPTIONS | {"num_warps": self.num_warps} | limit

    @property
    def names(self) -> list[str]:
        """Names of the positional arguments."""
        return self.kernel.arg_names[: len(self.args)]

    @property
    def name(self) -> str:
        """The kernel's name. A shared launch is named after the kernel of one unit that it runs (``sharing.py``)."""
        shared = self.constexprs.get("A")
        return self.kernel.__name__ if shared is None else shared.name

    def adding(self, added: torch.Tensor | None) -> Launch:
        """The launch with what is added to its seed, if it has one; see :mod:`~gckernels.toolkit.kernels.seeds`."""
        if added is None or ADDED not in self.constexprs:
            return self
        return replace(self, constexprs=self.constexprs | {ADDED: added})

    def run(self) -> Any:
        """Run the launch, or record it (see :func:`record_launches`); returns the compiled kernel, if there is one."""
        if _of_thread.recording is not None:
            _of_thread.recording.append(self)
            return None
        return self.kernel[self.grid](*self.args, **self.constexprs, **self.options)


class LaunchRecording(list[Launch]):
    """Recorded launches, and the ``temporaries`` among their arguments (see :func:`temporary`)."""

    def __init__(self) -> None:
        super().__init__()
        self.temporaries: list[tuple[torch.Tensor, bool]] = []  # each with whether it must be zeroed


class _OfThread(threading.local):
    recording: LaunchRecording | None = None


_of_thread = _OfThread()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    maxnreg: int | None = None,
    shared_maxnreg: int | None = None,
    **constexprs: Any,
) -> None:
    """Run ``kernel`` with the arguments of :class:`Launch`; an empty grid runs nothing.

    A kernel's arguments ``place`` and ``added_ptr`` are None if they are not among ``args``: its programs are those of
    the grid (:mod:`~gckernels.toolkit.kernels.places`), and nothing is added to its seed
    (:mod:`~gckernels.toolkit.kernels.seeds`).
    """
    left = kernel.arg_names[len(args) :]
    constexprs |= {name: None for name in OPTIONAL if name in left}
    if 0 not in grid:
        Launch(kernel, grid, args, constexprs, num_warps, maxnreg, shared_maxnreg).run()


def waits() -> bool:
    """Whether a barrier needs a wait for memory (:func:`~gckernels.toolkit.kernels.exchange.exchange_barrier`)."""
    return BACKEND == "hip"


def temporary(*shape: int, dtype: torch.dtype, device: torch.device, zeroed: bool = False) -> torch.Tensor:
    """A tensor for one call of a launcher, ``zeroed`` or not initialised, which nothing reads after the call.

    A recorded one is never written to, so it takes no memory of a GPU.
    """
    if _of_thread.recording is not None:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        _of_thread.recording.temporaries.append((tensor, zeroed))
        return tensor
    return (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)


@contextmanager
def record_launches() -> Iterator[LaunchRecording]:
    """Record the launches of this thread inside the ``with`` block, instead of running them."""
    outer, recording = _of_thread.recording, LaunchRecording()
    _of_thread.recording = recording
    try:
        yield recording
    finally:
        _of_thread.recording = outer


class BoundLaunch:
    """A launch that is repeated in every step with the same arguments.

    Triton looks at all arguments of a launch to find its compiled kernel, which takes most of the host's time. From the
    second call on a device, a bound launch directly calls the kernel that the first call returned. The facts that
    Triton looks at must not change: tensors must keep their addresses. Whatever changes from step to step, such as
    seeds, lies in tensors. Launch hooks of profilers are called. Settings that affect compilation, such as Triton's
    debugging, are read only at the first call.

    Args:
        launch: the launch to repeat.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._constants = tuple(launch.constexprs[name] for name in launch.kernel.arg_names[len(launch.args) :])
        self._grid = (*launch.grid, 1, 1)[:3]
        self._compiled: dict[int, Callable[..., None]] = {}  # by device
        self.use(launch.args)

    def use(self, args: tuple[Any, ...]) -> None:
        """Use the tensors in ``args`` from now on; addresses must be divisible by 16 wherever the old ones are."""
        self._args = (*args, *self._constants)

    def __call__(self) -> None:
        if 0 in self._grid:
            return
        if _of_thread.recording is not None or not isinstance(self._launch.kernel, JITFunction):
            self._run()  # an interpreted kernel is not compiled, and there may be no device
            return
        device = driver.active.get_current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            self._compiled[device] = self._run()[self._grid]
        else:
            stream = driver.active.get_current_stream(device)
            compiled(*self._args, stream=stream)

    def _run(self) -> Any:
        return replace(self._launch, args=self._args[: len(self._launch.args)]).run()
