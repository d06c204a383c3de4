"""Difficult gradients, the implementations of a compressor, and exact comparisons."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gckernels
from gckernels.codec import Backend, Decoding, Encoding, Recoding
from gckernels.toolkit import reference

POISON_BYTE = 0xCD  # fills payloads before encoding, and new memory
HAS_GPU = torch.cuda.is_available()

SIZES = (0, 1, 2, 7, 8, 9, 1023, 1024, 1025)
LARGE_SIZE = 100_003

# -------------------------------------------------------------------- gradients


def _with(value: float) -> Callable[[int], torch.Tensor]:
    """A function of ``numel`` that returns normally distributed values with ``value`` in the middle."""

    def make(numel: int) -> torch.Tensor:
        gradient = torch.randn(numel)
        gradient[numel // 2 : numel // 2 + 1] = value
        return gradient

    return make


def _alternating(numel: int) -> torch.Tensor:
    return torch.where(torch.arange(numel) % 2 == 0, 1.0, -1.0) * (1 + torch.arange(numel) / 64)


GRADIENTS: dict[str, Callable[[int], torch.Tensor]] = {
    "random": torch.randn,
    "heavy_tails": lambda numel: torch.randn(numel) / torch.rand(numel).clamp(min=1e-6),
    "zeros": torch.zeros,
    "negative_zeros": lambda numel: -torch.zeros(numel),
    "all_equal": lambda numel: torch.full((numel,), -0.3),
    "one_huge": _with(3e38),
    "denormals": lambda numel: torch.randn(numel) * 1e-40,
    "smallest": lambda numel: torch.randint(-2, 3, (numel,)) * 2.0**-149,
    "ties": lambda numel: torch.randint(-3, 4, (numel,)) * 0.5,
    "alternating_signs": _alternating,
}
"""Finite gradients that are difficult for quantisers, by name: functions from ``numel`` to fp32 ``[numel]``."""

NON_FINITE: dict[str, Callable[[int], torch.Tensor]] = {
    "nan": _with(torch.nan),
    "inf": _with(torch.inf),
    "negative_inf": _with(-torch.inf),
}


def random_residual(compressor: gckernels.Codec, numel: int) -> torch.Tensor:
    """A possible residual of earlier encodings: all states of the compressor, normally distributed, fp32."""
    return torch.randn(compressor.traits.states * numel)


def zero_residual(compressor: gckernels.Codec, numel: int) -> torch.Tensor:
    """The residual at the start of training: all states of the compressor, fp32."""
    return torch.zeros(compressor.traits.states * numel)


# -------------------------------------------------------------------- implementations


@dataclass(frozen=True)
class Implementation:
    """One of a compressor's implementations, called without the ops: ``host``, ``kernel`` or ``reference``.

    Tensors must be on ``device``.
    """

    name: str
    device: str

    def backend(self, compressor: gckernels.Codec) -> Backend:
        return {"reference": reference.REFERENCE, "host": compressor.host, "kernel": compressor.triton}[self.name]

    def encode(self, compressor, grad, residual, payload, size, seed=0, scale=1.0) -> None:
        """As ``Backend.encode``: ``payload`` is ``[chunks, nbytes]``."""
        self.backend(compressor).encode(Encoding(compressor, grad, residual, payload, seed, size), scale)

    def decode(self, compressor, payloads, out, size, scale=1.0, accumulate=False) -> None:
        """As ``Backend.decode``: ``payloads`` is ``[sources, chunks, nbytes]``."""
        self.backend(compressor).decode(Decoding(compressor, payloads, out, size), scale, accumulate)

    def recode(self, compressor, payloads, residual, payload, numel, size, scale=1.0, seed=0) -> None:
        """As ``Backend.recode``: ``payloads`` is ``[sources, nbytes]``, ``payload`` ``[nbytes]``."""
        self.backend(compressor).recode(Recoding(compressor, payloads, residual, payload, numel, seed, size), scale)


REFERENCE = Implementation("reference", "cpu")
HOST = Implementation("host", "cpu")
KERNEL = Implementation("kernel", "cuda" if HAS_GPU else "cpu")

# On a machine with a GPU, tests of kernels are GPU tests; on any other they are interpreted.
KERNEL_PARAM = pytest.param(KERNEL, id="kernel", marks=[pytest.mark.gpu] if HAS_GPU else [])
HOST_PARAM = pytest.param(HOST, id="host")
REFERENCE_PARAM = pytest.param(REFERENCE, id="reference")


def interpreted(configurations: Collection[gckernels.Codec]) -> pytest.MarkDecorator:
    """Mark: ``make test`` interprets kernels only in these configurations, ``make test-slow`` in the others.

    Only configurations that all marks of a test name are interpreted by ``make test``. Without a mark they are the
    default configurations of all classes.
    """
    return pytest.mark.interpreted(tuple(configurations))


INTERPRETED_SLOWLY = interpreted(())


class Guarded:
    """A copy of a tensor on a device, surrounded by guard memory that must not change."""

    MARGIN = 16384  # elements on either side; larger than the tile of any Triton program
    FILL = 0x5A

    def __init__(self, values: torch.Tensor, device: str) -> None:
        shape = (values.numel() + 2 * self.MARGIN,)
        self._buffer = torch.full(shape, self.FILL, dtype=values.dtype, device=device)
        self._last = values.numel() + self.MARGIN
        self.tensor = self._buffer[self.MARGIN : self._last].view(values.shape)
        self.tensor.copy_(values)

    def result(self) -> torch.Tensor:
        """The tensor on the CPU; fails if the guard memory has changed."""
        outside = torch.cat([self._buffer[: self.MARGIN], self._buffer[self._last :]])
        assert (outside == self.FILL).all(), "memory was written outside a tensor"
        return self.tensor.cpu()


class Operations(TorchDispatchMode):
    """Torch's operations inside the ``with`` block.

    Attributes:
        calls: for each operation its name and the numbers among its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        self.calls.append((str(operation), *(each for each in leaves if isinstance(each, int | float))))
        return operation(*args, **(kwargs or {}))


def number(value: int, device: str = "cpu") -> torch.Tensor:
    """A number to add to seeds, ``int64 [1]``, with the 64 bits of ``value``."""
    return torch.tensor([(value + 2**63) % 2**64 - 2**63], device=device)


def encode(
    implementation, compressor, grad, residual=None, chunks=1, seed=0, scale=1.0, size=None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(payload [chunks, nbytes], new residual)`` on the CPU; the arguments are not changed."""
    size = gckernels.chunk_numel(grad.numel(), chunks) if size is None else size
    shape = chunks, compressor.payload_nbytes(size)
    payload = Guarded(torch.full(shape, POISON_BYTE, dtype=torch.uint8), implementation.device)
    new_residual = None if residual is None else Guarded(residual, implementation.device)
    on_device = grad.to(implementation.device, copy=True)
    residual_tensor = new_residual and new_residual.tensor
    implementation.encode(compressor, on_device, residual_tensor, payload.tensor, size, seed, scale)
    assert_equal(on_device.cpu(), grad, "the gradient, which must only be read")
    return payload.result(), new_residual and new_residual.result()


def decode(implementation, compressor, payloads, out, scale=1.0, accumulate=False, size=None) -> torch.Tensor:
    """The new values of ``out`` on the CPU; the argument is not changed. ``payloads`` may lack its first dimensions."""
    payloads = payloads[(None,) * (3 - payloads.dim())]
    size = gckernels.chunk_numel(out.numel(), payloads.shape[1]) if size is None else size
    decoded = Guarded(out, implementation.device)
    on_device = payloads.to(implementation.device, copy=True)
    implementation.decode(compressor, on_device, decoded.tensor, size, scale, accumulate)
    assert torch.equal(on_device.cpu(), payloads), "a payload was written while it was decoded"
    return decoded.result()


def recode(
    implementation, compressor, payloads, residual, numel, scale=1.0, seed=0, size=None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(payload [nbytes], new residual)`` on the CPU; the arguments are not changed."""
    size = numel if size is None else size
    shape = (compressor.payload_nbytes(size),)
    payload = Guarded(torch.full(shape, POISON_BYTE, dtype=torch.uint8), implementation.device)
    new_residual = None if residual is None else Guarded(residual, implementation.device)
    on_device = payloads.to(implementation.device, copy=True)
    residual_tensor = new_residual and new_residual.tensor
    implementation.recode(compressor, on_device, residual_tensor, payload.tensor, numel, size, scale, seed)
    assert torch.equal(on_device.cpu(), payloads), "a payload was written while it was decoded"
    return payload.result(), new_residual and new_residual.result()


def decode_one(compressor, payload, numel, size=None) -> torch.Tensor:
    """The reference's decoding of ``payload [chunks, nbytes]`` as fp32 ``[numel]``."""
    return reference.decode_reference(compressor, payload[None], torch.zeros(numel), size=size)


# -------------------------------------------------------------------- comparisons and memory


def assert_equal(got: torch.Tensor, want: torch.Tensor, what: str = "values") -> None:
    """Assert that all elements are equal; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def lazily_committed(nbytes: int, device: str) -> torch.Tensor:
    """Zeros, ``uint8 [nbytes]``; on the CPU only touched pages take memory."""
    if device != "cpu":
        torch.cuda.empty_cache()  # test processes share the GPU's memory
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
