"""What the kernel benchmark measures: cases, their fewest bytes, and the calls that carry them out.

For every compressor and size: ``encode``, with feedback where the compressor needs it; ``decode`` of one payload; and
``decode`` of four payloads merged into their mean. Gradients are fp32. A copy of the same size is a case as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gckernels
from gckernels.toolkit import reference

OTHERS = (
    "BlockQuant(bits=4)",
    "BlockQuant(bits=4, block=32, scale_dtype='bfloat16')",
    "Cast16(dtype='float16')",
    "ChunkTopK(chunk=1024, k=40, value_bits=4)",
    "ChunkTopK(value_bits=2)",
    "EFSignSGD(block=None)",
    "LinearQuant(stochastic=True)",
    "TernGrad(block=None)",
)
"""Configurations besides the default one of every compressor, which is always measured."""

HOST_NUMEL = (2**14, 2**18, 2**22, 2**25)
CUDA_NUMEL = (2**14, 2**20, 2**22, 2**24, 2**26, 2**28)
EAGER_NUMEL = 2**22  # the only size of the references: larger ones would take minutes and many temporaries
YARDSTICK_NUMEL = 2**24  # 64 MiB, too large for the caches: its copy is what every rate is a percentage of
MERGED_SOURCES = 4
FUSED, EAGER, TORCH = "gckernels", "eager torch", "torch"  # implementations


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        spec: the compressor, as ``gckernels.from_spec`` reads it, or ``"copy"``.
        direction: ``"encode"``, ``"decode"`` or ``"copy"``.
        sources: payloads that are merged by ``decode``, else 1.
        implementation: :data:`FUSED`; :data:`EAGER` for the compressor's reference in plain torch, which is written to
            be read, not to be fast; :data:`TORCH` for copies.
    """

    spec: str
    direction: str
    sources: int
    implementation: str
    numel: int

    @property
    def moved_nbytes(self) -> int:
        """The fewest bytes that must be read and written.

        Encode: the gradient and, with feedback, the old residual are read, the new one and the payload written.
        Decode: the payloads are read, the gradient is written.
        """
        if self.direction == "copy":
            return 8 * self.numel
        compressor = gckernels.from_spec(self.spec)
        feedback = self.direction == "encode" and compressor.needs_feedback
        residual = 8 * compressor.states * self.numel if feedback else 0
        return 4 * self.numel + residual + self.sources * compressor.payload_nbytes(self.numel)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the tensors that the case works on: gradient, residual, output and payloads."""
        payloads = 0 if self.direction == "copy" else gckernels.from_spec(self.spec).payload_nbytes(self.numel)
        return 12 * self.numel + self.sources * payloads

    def eager(self) -> Case | None:
        """The same by the reference, at the size at which it is measured."""
        if self.implementation != FUSED or self.numel != EAGER_NUMEL:
            return None
        return dataclasses.replace(self, implementation=EAGER)

    def prepare(self, device: torch.device) -> Callable[[], Any]:
        """The call to time, on tensors filled with normally distributed values."""
        grad, residual, out = tensors(self.numel, device)
        if self.direction == "copy":
            return lambda: out.copy_(grad)
        compressor = gckernels.from_spec(self.spec)
        kept = residual.zero_() if compressor.needs_feedback else None
        if kept is not None and compressor.states > 1:
            kept = kept.repeat(compressor.states)
        payload_nbytes = compressor.payload_nbytes(self.numel)
        payloads = torch.empty(self.sources, payload_nbytes, dtype=torch.uint8, device=device)
        eager = self.implementation == EAGER
        if self.direction == "encode":
            if not eager:
                return lambda: compressor.encode(grad, kept, payloads[0])
            if kept is None:
                return lambda: compressor.encode_reference(grad, self.numel, 0, 0)
            return lambda: reference.encode_reference(compressor, grad, kept)
        for source, payload in enumerate(payloads):  # of different gradients: sparse payloads must not coincide
            compressor.encode(grad.normal_(), None, payload, seed=source)
        scale = 1.0 / self.sources
        if eager:
            return lambda: reference.decode_reference(compressor, payloads[:, None], out, scale)
        return lambda: compressor.decode(payloads, out, scale)


@functools.lru_cache(maxsize=1)  # the cases of one size follow one another
def tensors(numel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient, residual and output, fp32 ``[numel]``, shared by all cases of this size."""
    return torch.randn(numel, device=device), torch.zeros(numel, device=device), torch.empty(numel, device=device)


@functools.lru_cache(maxsize=1)
def yardstick(device: torch.device) -> Callable[[], Any]:
    """The copy that rates are compared with: :data:`YARDSTICK_NUMEL` fp32 values, read and written."""
    source, target = (torch.ones(YARDSTICK_NUMEL, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def all_specs() -> list[str]:
    """Every registered compressor at its default, and :data:`OTHERS`."""
    return sorted([*gckernels.COMPRESSORS, *OTHERS])


def all_cases(specs: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """Size by size, the copy first; without the references, which :meth:`Case.eager` gives."""
    cases = []
    for numel in sizes:
        cases.append(Case("copy", "copy", 1, TORCH, numel))
        for spec in specs:
            for direction, sources in (("encode", 1), ("decode", 1), ("decode", MERGED_SOURCES)):
                cases.append(Case(spec, direction, sources, FUSED, numel))
    return cases
