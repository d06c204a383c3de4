"""Cases of the kernel benchmark: their parameters, the least bytes that they move, and the calls to time.

There are cases for every compressor and size: ``encode``, with feedback where the compressor needs it; ``decode`` of
one payload; ``decode`` of several payloads merged into their mean; and ``recode`` of them. On a GPU there are also
gradients in bf16, and small units that are bound. A copy is a case as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gckernels
from bench.lib.peers import PEERS, Peer
from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import Decoding, Encoding, Recoding
from gckernels.toolkit import reference
from gckernels.toolkit.kernels.launch import Launch, record_launches

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
"""Configurations that are measured in addition to the default one of every compressor."""

HOST_NUMEL = (2**14, 2**18, 2**22, 2**25)
EAGER_NUMEL = 2**22  # references are measured up to this size: larger ones take minutes and many temporaries
MERGED_SOURCES = 4
FUSED, BOUND, EAGER, COMPILED, TORCH = "gckernels", "gckernels, bound", "eager torch", "compiled torch", "torch"
EIGHT_BITS = "gckernels, residual in 8 bits"
"""Names of the implementations."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # gradient, residual, output; all of the same length


@dataclass(frozen=True)
class Case:
    """One call to measure, with its parameters.

    Attributes:
        spec: the compressor, as ``gckernels.from_spec`` reads it, or ``"copy"``.
        direction: ``"encode"``, ``"decode"``, ``"recode"`` or ``"copy"``.
        sources: number of payloads that ``decode`` and ``recode`` merge; otherwise 1.
        implementation: :data:`FUSED`; :data:`BOUND` for the same in a batch of one unit; :data:`EIGHT_BITS` for
            encoding with a residual in 8 bits; :data:`EAGER` for the compressor's reference in plain torch, which is
            written to be read, not to be fast; :data:`COMPILED` for that reference under ``torch.compile``; a name in
            ``PEERS`` of ``peers.py`` for that quantiser, compiled, which has no feedback; :data:`TORCH` for copies.
        numel: number of elements of the gradient.
        dtype: dtype of the gradient and the output; fp32 for copies. ``recode`` always computes in fp32.
    """

    spec: str
    direction: str
    sources: int
    implementation: str
    numel: int
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of that name."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def moved_nbytes(self) -> int:
        """The least number of bytes that must be read and written.

        Encode reads the gradient and writes the payload; with feedback it also reads and writes the residual. Decode
        reads the payloads and writes the gradient. Recode reads the payloads and writes a new one; with feedback it
        also reads and writes the residual.
        """
        if self.direction == "copy":
            return 8 * self.numel
        if peer := PEERS.get(self.implementation):
            return peer.encoded_nbytes(self.numel) + self.torch_dtype.itemsize * self.numel
        compressor, shard = self.compressor, self.compressor.shard_compressor
        payloads_nbytes = self.sources * compressor.payload_nbytes(self.numel)
        grad_nbytes = self.torch_dtype.itemsize * self.numel
        if self.direction == "recode":
            residual_nbytes = 8 * shard.traits.states * self.numel if shard.traits.needs_feedback else 0
            return payloads_nbytes + residual_nbytes + shard.payload_nbytes(self.numel)
        feedback = self.direction == "encode" and compressor.traits.needs_feedback
        residual_nbytes = 8 * compressor.traits.states * self.numel if feedback else 0
        if self.implementation == EIGHT_BITS:
            residual_nbytes = 2 * gckernels.residual_nbytes(self.numel)
        return grad_nbytes + residual_nbytes + payloads_nbytes

    @property
    def compressor(self) -> gckernels.Codec:
        """The compressor of ``spec``."""
        compressor = gckernels.from_spec(self.spec)
        assert isinstance(compressor, gckernels.Codec)
        return compressor

    @property
    def held_nbytes(self) -> int:
        """Bytes of the tensors that the case works on: gradient, residual, output and payloads."""
        states, payload_nbytes = 1, 0
        if self.direction != "copy":
            states, payload_nbytes = self.compressor.traits.states, self.compressor.payload_nbytes(self.numel)
        return (4 + 4 * states + 4) * self.numel + (self.sources + 1) * payload_nbytes

    def compared(self) -> list[Case]:
        """A copy of as many bytes, the reference up to :data:`EAGER_NUMEL` elements, and this case."""
        copy = Case("copy", "copy", 1, TORCH, -(-self.moved_nbytes // 8))
        eager = [dataclasses.replace(self, implementation=EAGER)] if self.numel <= EAGER_NUMEL else []
        return [copy, *eager, self]

    def prepare(self, device: torch.device) -> Callable[[], Any]:
        """The call to time, on normally distributed tensors that all cases of this size share, but for copies."""
        if self.direction == "copy":
            source, target = torch.ones(2, self.numel, device=device)
            return self.on((source, source, target))
        return self.on(tensors(self.numel, device))

    def on(self, tensors: Tensors) -> Callable[[], Any]:
        """The call to time, on ``tensors``."""
        grad, residual, out = tensors
        if self.direction == "copy":
            return lambda: out.copy_(grad)
        if peer := PEERS.get(self.implementation):
            return self._of_peer(peer, grad, out)
        compressor = self.compressor
        payloads = torch.empty(
            self.sources + 1, compressor.payload_nbytes(self.numel), dtype=torch.uint8, device=grad.device
        )
        *_, payload = payloads  # written by encode and recode
        if self.direction == "encode":
            feedback = _zeroed(residual, compressor.traits.states) if compressor.traits.needs_feedback else None
            if self.implementation == EIGHT_BITS:
                feedback = gckernels.encode_residual(residual)
            return self._encode(grad, feedback, payload)
        received = payloads[: self.sources]
        for source, each in enumerate(received):  # from different gradients: sparse payloads must not coincide
            compressor.encode(grad.normal_(), None, each, seed=source)
        if self.direction == "recode":
            shard = compressor.shard_compressor
            feedback = _zeroed(residual, shard.traits.states) if shard.traits.needs_feedback else None
            if self.implementation == FUSED:
                return lambda: compressor.recode(received, feedback, payload, self.numel, 1.0 / self.sources)
            merged = self._decode(received, out)
            return self._peer(lambda: reference.encode_reference(shard, merged(), feedback))
        return self._decode(received, out)

    def _encode(self, grad: torch.Tensor, residual: torch.Tensor | None, payload: torch.Tensor) -> Callable[[], Any]:
        compressor = self.compressor
        if self.implementation in (FUSED, EIGHT_BITS):
            return lambda: compressor.encode(grad, residual, payload)
        if self.implementation == BOUND:
            return bind_encodes([Encoding(compressor, grad, residual, payload)])
        if residual is None:
            return self._peer(lambda: compressor.encode_reference(grad, self.numel, 0, 0))
        return self._peer(lambda: reference.encode_reference(compressor, grad, residual))

    def _decode(self, payloads: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        compressor, scale = self.compressor, 1.0 / self.sources
        if self.implementation == FUSED:
            return lambda: compressor.decode(payloads, out, scale)
        if self.implementation == BOUND:
            return bind_decodes([Decoding(compressor, payloads, out)], scale)
        return self._peer(lambda: reference.decode_reference(compressor, payloads[:, None], out, scale))

    def _peer(self, call: Callable[[], Any]) -> Callable[[], Any]:
        return call if self.implementation == EAGER else torch.compile(call, dynamic=False)

    def _of_peer(self, peer: Peer, grad: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        rows, out = grad.view(-1, peer.length), out.view(-1, peer.length)
        if self.direction == "encode":
            return self._peer(lambda: peer.encode(rows))
        codes, scales = peer.encode(rows)
        return self._peer(lambda: out.copy_(peer.decode(codes, scales)))

    def launches(self) -> list[Launch]:
        """The launches that the call makes on a GPU, recorded without one; none of implementations in torch."""
        if self.implementation not in (FUSED, BOUND, EIGHT_BITS):
            return []
        compressor, shard, scale = self.compressor, self.compressor.shard_compressor, 1.0 / self.sources
        bound = self.implementation == BOUND
        device = "cpu" if bound else "meta"  # tensors that are bound need addresses
        grad = torch.empty(self.numel, dtype=self.torch_dtype, device=device)
        states = (shard if self.direction == "recode" else compressor).traits.states
        residual = torch.empty(states * self.numel, device=device)
        if self.implementation == EIGHT_BITS:
            residual = torch.empty(1, gckernels.residual_nbytes(self.numel), dtype=torch.uint8, device=device)
        payloads = torch.empty(self.sources, 1, compressor.payload_nbytes(self.numel), dtype=torch.uint8, device=device)
        with record_launches() as recorded:
            if self.direction == "encode":
                feedback = residual if compressor.traits.needs_feedback else None
                encoding = Encoding(compressor, grad, feedback, payloads[0], 0, self.numel)
                if bound:
                    compressor.triton.bind_encodes([encoding])()
                else:
                    compressor.triton.encode(encoding)
            elif self.direction == "decode":
                decoding = Decoding(compressor, payloads, grad, self.numel)
                if bound:
                    compressor.triton.bind_decodes([decoding], scale)()
                else:
                    compressor.triton.decode(decoding, scale)
            else:
                feedback = residual if shard.traits.needs_feedback else None
                target = feedback, payloads[0, 0], self.numel, 0, self.numel
                compressor.triton.recode(Recoding(compressor, payloads[:, 0], *target), scale)
        return recorded


def _zeroed(residual: torch.Tensor, states: int) -> torch.Tensor:
    residual.zero_()
    return residual if states == 1 else residual.repeat(states)


@functools.lru_cache(maxsize=1)  # cases of one size are consecutive
def tensors(numel: int, device: torch.device) -> Tensors:
    """Gradient, residual and output, fp32 ``[numel]``, shared by all cases of this size."""
    return new_tensors(numel, device)


def new_tensors(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensors:
    """New gradient and output of ``dtype`` and residual in fp32, each ``[numel]``."""
    grad = torch.randn(numel, device=device, dtype=dtype)
    return grad, torch.zeros(numel, device=device), torch.empty_like(grad)


def all_specs() -> list[str]:
    """Specs of every registered compressor at its default, and :data:`OTHERS`."""
    return sorted([*gckernels.CODECS, *OTHERS])


def all_cases(specs: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """All cases in fp32, size by size, without those that :meth:`Case.compared` adds."""
    return [case for numel in sizes for spec in specs for case in directions(spec, numel, "float32", MERGED_SOURCES)]


def directions(spec: str, numel: int, dtype: str, merged: int) -> list[Case]:
    """Cases of encode, decode of one payload and of ``merged``, and recode, which is fp32 only."""
    calls = (("encode", 1), ("decode", 1), ("decode", merged), ("recode", merged))
    return [
        Case(spec, direction, sources, FUSED, numel, dtype)
        for direction, sources in calls
        if direction != "recode" or dtype == "float32"
    ]
