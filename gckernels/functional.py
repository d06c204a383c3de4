"""Functions that encode, decode and recode tensors of any shape: :func:`encode`, :func:`decode`, :func:`recode`.

They return new tensors, where the methods of :class:`~gckernels.Codec` write into their arguments.
``docs/operators.md`` shows how to use them. ``torch.compile`` traces each of them to one op, without a graph break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import payload_nbytes, resolve_size
from .codec import GRAD_DTYPES, Codec
from .toolkit.fields import as_dtype
from .toolkit.values import as_int, as_shape, as_size, require_tensors

_MAX_CHUNKS = 2**31 - 1


def encode(
    compressor: Codec,
    grad: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    chunks: int = 1,
    seed: int = 0,
    scale: float = 1.0,
    size: int | None = None,
) -> torch.Tensor:
    """Encode ``grad``, a tensor of any shape, into a new payload.

    With ``p = grad + residual`` the payload is ``C(scale * p)``, and the residual becomes ``p - D(payload) / scale``.

    Args:
        compressor: the algorithm and its configuration, e.g. ``EFSignSGD(block=1024)``.
        grad: any shape, contiguous, fp32, bf16 or fp16.
        residual: the part of earlier gradients that has not been sent, fp32, with the shape of ``grad``
            (``[states, *grad.shape]`` for compressors with several ``states``), contiguous, changed in place; zeros at
            first. ``None`` for no error feedback. In 8 bits, ``uint8``, as for :meth:`gckernels.Codec.encode`.
        chunks: number of parts into which ``grad``, as a vector, is cut (:func:`gckernels.chunk_numel` elements each).
            Every part gets a payload.
        seed: random seed of the stochastic compressors, 64 bits: from ``-2**63`` to ``2**64 - 1``. The same seed gives
            the same bytes.
        scale: factor on the encoded values; summable compressors only.
        size: number of elements for which every payload is laid out; by default the number that it contains. A larger
            ``size`` gives a short shard a payload as large as those of the other shards.

    Returns:
        The payload, ``uint8 [nbytes]`` or, with several chunks, ``[chunks, nbytes]``, where ``nbytes`` is
        ``compressor.payload_nbytes(size)``.

    Raises:
        TypeError, ValueError: naming the argument; nothing has been changed.
    """
    name = _require_compressor("encode", compressor)
    chunks, size = as_int(name, "chunks", chunks, 1, _MAX_CHUNKS), as_size(name, size)
    vector, kept = _vector(name, "grad", grad), None
    if isinstance(residual, torch.Tensor) and residual.dtype == torch.uint8:
        kept = residual
    elif residual is not None:
        kept = _vector(name, "residual", residual)
        states = compressor.traits.states
        wanted = grad.shape if states == 1 else (states, *grad.shape)
        if residual.shape != wanted:
            several = f"{states} times " if states > 1 else ""
            shapes = f"{tuple(wanted)}, got {tuple(residual.shape)}"
            raise ValueError(f"{name}: residual must have {several}the shape of grad, {shapes}")
    size = resolve_size(name, "chunks", vector.numel(), chunks, size)
    nbytes = payload_nbytes(compressor, size)
    payload = torch.empty(nbytes if chunks == 1 else (chunks, nbytes), dtype=torch.uint8, device=grad.device)
    compressor.encode(vector, kept, payload, seed, scale, size)
    return payload


def decode(
    compressor: Codec,
    payloads: torch.Tensor,
    shape: int | Sequence[int] | None = None,
    *,
    chunks: int = 1,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    accumulate: bool = False,
    size: int | None = None,
) -> torch.Tensor:
    """Decode payloads of :func:`encode`; several payloads are merged into ``scale`` times their sum.

    Args:
        compressor: as in :func:`encode`.
        payloads: ``uint8``, from one source, ``[nbytes]`` or ``[chunks, nbytes]``, or from several,
            ``[sources, nbytes]`` or ``[sources, chunks, nbytes]``.
        shape: shape of the result, a sequence, or an int for a vector. Not needed with ``out``.
        chunks: as in :func:`encode`; not needed for payloads of three dimensions.
        scale: factor on the sum, ``1 / sources`` for the mean.
        out: tensor to write into, any shape, contiguous, fp32, bf16 or fp16.
        out_dtype: dtype of the result, fp32, bf16 or fp16, as a dtype or its name; by default fp32, or that of ``out``.
            Sums are always computed in fp32.
        accumulate: whether to add to the values of ``out``.
        size: as in :func:`encode`.

    Returns:
        ``out``, or a new tensor.

    Raises:
        TypeError, ValueError: naming the argument; nothing has been changed.
    """
    name = _require_compressor("decode", compressor)
    require_tensors(name, payloads=payloads)
    chunks = as_int(name, "chunks", chunks, 1, _MAX_CHUNKS)
    shape = None if shape is None else as_shape(name, shape)
    out_dtype = None if out_dtype is None else _out_dtype(name, out_dtype)
    if chunks != 1:
        payloads = _with_chunks(name, payloads, chunks)
    if out is None:
        if shape is None:
            raise TypeError(f"{name}: either shape or out must be given")
        if accumulate:
            raise ValueError(f"{name}: accumulate needs out")
        out = torch.empty(shape, dtype=out_dtype or torch.float32, device=payloads.device)
    else:
        _check_out(name, out, shape, out_dtype)
    compressor.decode(payloads, _vector(name, "out", out), scale, accumulate, size)
    return out


def recode(
    compressor: Codec,
    payloads: torch.Tensor,
    residual: torch.Tensor | None,
    numel: int,
    *,
    scale: float = 1.0,
    seed: int = 0,
    size: int | None = None,
) -> torch.Tensor:
    """Decode, merge and encode again, as the owner of a shard does.

    The result equals that of :func:`decode` to fp32 and :func:`encode` with ``compressor.shard_compressor`` bit for
    bit. If the algorithm allows, the decoded vector is never stored.

    Args:
        compressor: as in :func:`encode`.
        payloads: ``uint8 [sources, nbytes]``.
        residual: as in :func:`encode`, for ``compressor.shard_compressor`` and ``numel`` elements, or ``None``.
        numel: number of elements of the shard.
        scale: factor on the sum, ``1 / sources`` for the mean.
        seed: as in :func:`encode`.
        size: number of elements for which every payload is laid out, at least ``numel``; by default ``numel``.

    Returns:
        The payload, ``uint8 [nbytes]``.

    Raises:
        TypeError, ValueError: naming the argument; nothing has been changed.
    """
    name = _require_compressor("recode", compressor)
    require_tensors(name, payloads=payloads)
    numel, size = as_int(name, "numel", numel, 0), as_size(name, size)
    residual = None if residual is None else _vector(name, "residual", residual)
    size = resolve_size(name, "payloads", numel, 1, size)
    payload = torch.empty(payload_nbytes(compressor, size), dtype=torch.uint8, device=payloads.device)
    compressor.recode(payloads, residual, payload, numel, scale, seed, size)
    return payload


# -------------------------------------------------------------------- arguments


def _require_compressor(verb: str, compressor: Any) -> str:
    """The prefix of error messages; raises TypeError if ``compressor`` is not a Compressor."""
    if not isinstance(compressor, Codec):
        got = f"the class {compressor.__name__}" if isinstance(compressor, type) else type(compressor).__name__
        raise TypeError(f"{verb}: compressor must be a Compressor such as EFSignSGD(), got {got}")
    return f"{compressor.name}.{verb}"


def _vector(name: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` as a vector."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: {argument} must be dense, got {tensor.layout}")
    if not tensor.is_contiguous():
        got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name}: {argument} must be contiguous, got {got}")
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _with_chunks(name: str, payloads: torch.Tensor, chunks: int) -> torch.Tensor:
    """``payloads`` as ``[sources, chunks, nbytes]``."""
    if payloads.dim() == 2:
        payloads = payloads.unsqueeze(0)
    if payloads.dim() != 3 or payloads.shape[1] != chunks:
        got = tuple(payloads.shape)
        raise ValueError(f"{name}: payloads must be [{chunks}, nbytes] or [sources, {chunks}, nbytes], got shape {got}")
    return payloads


def _out_dtype(name: str, given: Any) -> torch.dtype:
    dtype = as_dtype(f"{name}: out_dtype", given)
    if dtype not in GRAD_DTYPES:
        raise TypeError(f"{name}: out_dtype must be {', '.join(map(str, GRAD_DTYPES))}, got {dtype}")
    return dtype


def _check_out(name: str, out: torch.Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> None:
    require_tensors(name, out=out)
    if dtype is not None and out.dtype != dtype:
        raise TypeError(f"{name}: out must have the dtype out_dtype, {dtype}, got {out.dtype}")
    if shape is not None and tuple(out.shape) != shape:
        raise ValueError(f"{name}: out must have the shape {shape}, got {tuple(out.shape)}")
