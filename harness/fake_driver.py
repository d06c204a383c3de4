"""A GPU driver for Triton that launches nothing, to measure and test the host's part of launches without a GPU.

    driver = fake_driver.install()

Triton then finds an NVIDIA GPU of compute capability 9.0. Kernels are specialised and looked up as on that GPU, but not
compiled, and every launch calls ``driver.launched``. The environment must not have ``TRITON_INTERPRET`` set. Tensors
may be on the CPU, because nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)


class FakeDriver:
    """A stand-in for the CUDA driver, with every method that Triton calls.

    Attributes:
        device, stream: the current device and stream.
        launched: called with the grid, the stream, the kernel and all its arguments, constants included.
        compiled: number of kernels compiled so far.
    """

    def __init__(self) -> None:
        self.device, self.stream = 0, 0
        self.launched: Callable[..., None] = lambda *_: None
        self.compiled = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *_: (1, 1, 32, 0, 1024),  # module, function, registers, spills, maximum threads
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        def launch(x, y, z, stream, function, packed, of_launch, on_enter, on_exit, *args):
            if on_enter is not None:
                on_enter(of_launch)
            self.launched((x, y, z), stream, src.fn, args)
            if on_exit is not None:
                on_exit(of_launch)

        return launch


class _Kernel(CompiledKernel):
    """A stand-in for a compiled kernel, without its program."""

    def __init__(self, src: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        self.src, self.name, self.hash, self.kernel = src, src.name, src.hash(), b""
        self.metadata = SimpleNamespace(
            shared=0, num_warps=options["num_warps"], tmem_size=None, warp_size=target.warp_size, target=target
        )
        self.packed_metadata: tuple[int, ...] = ()
        self.metadata_group: dict[str, str] = {}
        self.module = self.function = self._run = self._module_pid = None


def install() -> FakeDriver:
    """Make Triton use a new :class:`FakeDriver` in this process; returns the driver."""
    fake = FakeDriver()

    def compile_nothing(src: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> CompiledKernel:
        fake.compiled += 1
        return _Kernel(src, target, options)

    driver.set_active(fake)
    triton.compiler.compile = compile_nothing
    return fake
