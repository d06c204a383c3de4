"""How kernels are launched, in one place, so that launches can be recorded instead of run, and bound.

Ahead-of-time compilation needs to know every kernel in every configuration that ships. Rather than a list kept by
hand, the launchers themselves run under :func:`record_launches` and what they would have launched is compiled. What is
launched in every step with the same tensors is a :class:`BoundLaunch`.
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

``enable_fp_fusion`` is off because a contracted multiply-add would round a residual or a merged value differently
from the reference; the kernels are bound by memory and do not get slower.
"""


BACKEND = "hip" if torch.version.hip else "cuda"
"""Triton's backend for the GPUs that this torch is made for."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid, positional arguments, constexpr arguments by name, and what the compiler is told.

    Attributes:
        maxnreg: registers that a thread may have on an NVIDIA GPU. Without it ptxas chooses, and in kernels with loops
            inside of loops rather spills one or two values than give up a step of occupancy.
        exchanges: threads of a program hand each other values through global memory, with barriers in between. On
            NVIDIA GPUs a barrier orders that; on those of AMD it does not wait for memory, and the launch is refused.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int = 4
    maxnreg: int | None = None
    exchanges: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options on this machine."""
        return self.options_for(BACKEND)

    def options_for(self, backend: str) -> dict[str, Any]:
        """Compiler options of ``"cuda"`` or ``"hip"``."""
        limit = {"maxnreg": self.maxnreg} if self.maxnreg is not None and backend == "cuda" else {}
        return OPTIONS | {"num_warps": self.num_warps} | limit

    @property
    def names(self) -> list[str]:
        """Names of the positional arguments."""
        return self.kernel.arg_names[: len(self.args)]

    def run(self) -> Any:
        """Run it, or record it, see :func:`record_launches`; returns the compiled kernel, if there is one.

        Raises:
            NotImplementedError: the launch ``exchanges``, on an AMD GPU.
        """
        if _of_thread.recording is not None:
            _of_thread.recording.append(self)
            return None
        if self.exchanges and BACKEND == "hip":
            raise NotImplementedError(
                f"{self.kernel.__module__}.{self.kernel.__name__} does not run on AMD GPUs, whose barriers do not "
                "order what threads exchange through memory; casts and element-wise quantisers run there"
            )
        return self.kernel[self.grid](*self.args, **self.constexprs, **self.options)


class Recording(list[Launch]):
    """Launches that were recorded, and the ``temporaries`` among their arguments, see :func:`temporary`."""

    def __init__(self) -> None:
        super().__init__()
        self.temporaries: list[tuple[torch.Tensor, bool]] = []  # each with whether it must be zeroed


class _OfThread(threading.local):
    recording: Recording | None = None


_of_thread = _OfThread()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    maxnreg: int | None = None,
    exchanges: bool = False,
    **constexprs: Any,
) -> None:
    """Run ``kernel``, see :class:`Launch`; an empty grid runs nothing."""
    if 0 not in grid:
        Launch(kernel, grid, args, constexprs, num_warps, maxnreg, exchanges).run()


def temporary(*shape: int, dtype: torch.dtype, device: torch.device, zeroed: bool = False) -> torch.Tensor:
    """Memory for one call of a launcher: what its launches write, or find ``zeroed``, and nobody reads afterwards."""
    if _of_thread.recording is not None:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        _of_thread.recording.temporaries.append((tensor, zeroed))
        return tensor
    return (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)


@contextmanager
def record_launches() -> Iterator[Recording]:
    """Collect the launches of this block, in this thread, instead of running them."""
    outer, recording = _of_thread.recording, Recording()
    _of_thread.recording = recording
    try:
        yield recording
    finally:
        _of_thread.recording = outer


class BoundLaunch:
    """A launch that is done in every step with the same arguments, but for one that may be named.

    Triton finds the compiled kernel of a launch by looking at all of its arguments, which takes longer than all else.
    So from the second call on a device this goes straight to the kernel that the first call returned. What Triton looks
    at must not change: the tensors keep their places in memory, and the argument that changes is one that Triton
    does not specialise and whose type is declared. Hooks that profilers set on launches are called. What changes the
    compilation itself, such as Triton's debugging, is looked at once.

    Args:
        launch: the first call.
        changing: name of the positional argument that every call is given.
    """

    def __init__(self, launch: Launch, changing: str | None = None) -> None:
        self._launch = launch
        self._place = len(launch.args) if changing is None else launch.names.index(changing)
        self._constants = tuple(launch.constexprs[name] for name in launch.kernel.arg_names[len(launch.args) :])
        self._grid = (*launch.grid, 1, 1)[:3]
        self._compiled: dict[int, Callable[..., None]] = {}  # by device
        self.use(launch.args)

    def use(self, args: tuple[Any, ...]) -> None:
        """Take tensors from now on that are in other places, with addresses that 16 divides as before."""
        self._before, self._after = args[: self._place], (*args[self._place + 1 :], *self._constants)

    def __call__(self, *changed: Any) -> None:
        if 0 in self._grid:
            return
        if _of_thread.recording is not None or not isinstance(self._launch.kernel, JITFunction):
            self._run(changed)  # an interpreted kernel is not compiled, and there may be no device at all
            return
        device = driver.active.get_current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            self._compiled[device] = self._run(changed)[self._grid]
        else:
            stream = driver.active.get_current_stream(device)
            compiled(*self._before, *changed, *self._after, stream=stream)

    def _run(self, changed: tuple[Any, ...]) -> Any:
        args = (*self._before, *changed, *self._after)[: len(self._launch.args)]
        return replace(self._launch, args=args).run()


def bind_launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    changing: str | None = None,
    num_warps: int = 4,
    maxnreg: int | None = None,
    **constexprs: Any,
) -> BoundLaunch:
    """A :class:`BoundLaunch` with the arguments of :func:`launch`."""
    return BoundLaunch(Launch(kernel, grid, args, constexprs, num_warps, maxnreg), changing)
