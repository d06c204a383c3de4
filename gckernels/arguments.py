"""Checks of a compressor's arguments: tensors, and the size of a chunk.

The ops run these checks first, so they apply to every way of calling a compressor.
"""

from __future__ import annotations

import functools

import torch

from .codec import CHUNK_ALIGN, GRAD_DTYPES, Codec, chunk_numel
from .toolkit.payload import ALIGN_NBYTES
from .toolkit.residuals import residual_nbytes


def check_encode(
    compressor: Codec,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    scale: float,
    size: int | None,
) -> tuple[torch.Tensor, int]:
    """Check the arguments of ``encode``; returns the payload as ``[chunks, nbytes]`` and the size of a chunk."""
    name = f"{compressor.name}.encode"
    _check_vector(name, "grad", grad, GRAD_DTYPES)
    if residual is not None:
        check_like(name, "residual", residual, grad)
        if residual.dtype != torch.uint8:
            _check_values(name, compressor, residual, grad.numel(), "grad has")
    if scale != 1.0 and not compressor.traits.summable:
        raise ValueError(f"{name}: scale must be 1.0 for a compressor that is not summable, got {scale}")
    _check_payload(name, "payload", payload, (1, 2))
    check_like(name, "payload", payload, grad)
    rows = payload if payload.dim() == 2 else payload.unsqueeze(0)
    size = _chunk_size(name, "payload", compressor, grad.numel(), rows.shape[0], rows.shape[1], size)
    if residual is not None and residual.dtype == torch.uint8:
        _check_encoded_residual(name, compressor, residual, rows.shape[0], size)
    return rows, size


def check_decode(
    compressor: Codec, payloads: torch.Tensor, out: torch.Tensor, size: int | None
) -> tuple[torch.Tensor, int]:
    """Check the arguments of ``decode``; returns payloads ``[sources, chunks, nbytes]`` and the size of a chunk."""
    name = f"{compressor.name}.decode"
    _check_vector(name, "out", out, GRAD_DTYPES)
    _check_payload(name, "payloads", payloads, (1, 2, 3))
    check_like(name, "payloads", payloads, out)
    if payloads.dim() == 1:
        payloads = payloads.view(1, 1, -1)
    elif payloads.dim() == 2:
        payloads = payloads.unsqueeze(1)
    _, chunks, nbytes = payloads.shape
    return payloads, _chunk_size(name, "payloads", compressor, out.numel(), chunks, nbytes, size)


def check_recode(
    compressor: Codec,
    payloads: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    numel: int,
    size: int | None,
) -> int:
    """Check the arguments of ``recode``; returns the number of elements for which payloads are laid out."""
    name = f"{compressor.name}.recode"
    if numel < 0:
        raise ValueError(f"{name}: numel must not be negative, got {numel}")
    _check_payload(name, "payloads", payloads, (2,))
    _check_payload(name, "payload", payload, (1,))
    check_like(name, "payload", payload, payloads)
    if residual is not None:
        check_like(name, "residual", residual, payloads)
        if residual.dtype != torch.uint8:
            _check_values(name, compressor.shard_compressor, residual, numel, "numel is")
    _chunk_size(name, "payload", compressor, numel, 1, payload.numel(), size)
    size = _chunk_size(name, "payloads", compressor, numel, 1, payloads.shape[1], size)
    if residual is not None and residual.dtype == torch.uint8:
        _check_encoded_residual(name, compressor.shard_compressor, residual, 1, size)
    return size


def check_added(added: torch.Tensor | None, device: torch.device) -> None:
    """Check the tensor with the number that is added to the seeds of units on ``device``, if there is one."""
    if added is None:
        return
    if added.dtype != torch.int64:
        raise TypeError(f"added must be torch.int64, got {added.dtype}")
    if added.numel() != 1:
        raise ValueError(f"added must have one element, got shape {tuple(added.shape)}")
    if added.device != device:
        raise ValueError(f"added is on {added.device}, the units on {device}")


def _check_vector(name: str, argument: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: {argument} must be {allowed}, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: {argument} must be a contiguous vector, got shape {shape} with strides {stride}")


def _check_values(name: str, compressor: Codec, residual: torch.Tensor, numel: int, there: str) -> None:
    """Check a residual of fp32 values for a unit of ``numel`` elements."""
    _check_vector(name, "residual", residual, (torch.float32,))
    states = compressor.traits.states
    if residual.numel() != states * numel:
        each = f"; the residual must have {states} times as many" if states > 1 else ""
        raise ValueError(f"{name}: residual has {residual.numel()} elements, {there} {numel}{each}")


def _check_encoded_residual(name: str, compressor: Codec, residual: torch.Tensor, chunks: int, size: int) -> None:
    """Check a residual in 8 bits for a unit with ``chunks`` payloads of ``size`` elements."""
    if not compressor.encodes_residuals:
        raise TypeError(f"{name}: residual must be torch.float32 for this compressor, got torch.uint8")
    wanted, shape = (chunks, residual_nbytes(size)), tuple(residual.shape)
    if shape != wanted and not (chunks == 1 and shape == wanted[1:]):
        raise ValueError(
            f"{name}: a residual in 8 bits must have the shape {wanted} for {chunks} payload(s) of {size} elements, "
            f"got {shape}"
        )
    if not residual.is_contiguous() or residual.storage_offset() % ALIGN_NBYTES:
        raise ValueError(
            f"{name}: a residual in 8 bits must be contiguous and 16-byte aligned, got strides {residual.stride()} and "
            f"storage offset {residual.storage_offset()}"
        )


def check_like(name: str, argument: str, tensor: torch.Tensor, grad: torch.Tensor) -> None:
    if tensor.device != grad.device:
        raise ValueError(f"{name}: {argument} is on {tensor.device}, the other tensors on {grad.device}")


def _check_payload(name: str, argument: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"{name}: {argument} must be torch.uint8, got {tensor.dtype}")
    if tensor.dim() not in dims:
        raise ValueError(f"{name}: {argument} must have {' or '.join(map(str, dims))} dimensions, got {tensor.dim()}")
    *outer, last = strides = tensor.stride()
    misaligned = tensor.storage_offset() % ALIGN_NBYTES
    for stride in outer:
        misaligned += stride % ALIGN_NBYTES
    if misaligned or (last != 1 and tensor.shape[-1] > 1):
        raise ValueError(
            f"{name}: {argument} must be contiguous in its last dimension and 16-byte aligned in the others, got "
            f"strides {strides} and storage offset {tensor.storage_offset()}"
        )


def _chunk_size(
    name: str, argument: str, compressor: Codec, numel: int, chunks: int, nbytes: int, size: int | None
) -> int:
    size = resolve_size(name, argument, numel, chunks, size)
    wanted = _payload_nbytes(compressor, size)
    if nbytes != wanted:
        raise ValueError(
            f"{name}: {argument} must have {wanted} bytes per chunk for {numel} elements in {chunks} chunk(s) of "
            f"{size}, got {nbytes}"
        )
    return size


def payload_nbytes(compressor: Codec, size: int) -> int:
    """``compressor.payload_nbytes(size)``, computed once unless the size is a symbol."""
    if torch.compiler.is_compiling() or isinstance(size, torch.SymInt):
        return compressor.payload_nbytes(size)
    return _payload_nbytes(compressor, size)


@functools.lru_cache(maxsize=65536)
def _payload_nbytes(compressor: Codec, size: int) -> int:
    return compressor.payload_nbytes(size)


def resolve_size(name: str, argument: str, numel: int, chunks: int, size: int | None) -> int:
    """The number of elements for which each of ``chunks`` payloads of a unit of ``numel`` elements is laid out.

    Args:
        name: prefix of error messages.
        argument: name of the argument that determines ``chunks``.
        numel: number of elements of the unit.
        chunks: number of payloads.
        size: the caller's choice, ``None`` for the default.

    Raises:
        ValueError: ``size`` or ``chunks`` is not possible.
    """
    if chunks < 1:
        raise ValueError(f"{name}: {argument} must have at least one chunk, got {chunks}")
    if size is None:
        return chunk_numel(numel, chunks)
    if size * chunks < numel:
        raise ValueError(f"{name}: size {size} is too small for {numel} elements in {chunks} chunk(s)")
    if chunks > 1 and size % CHUNK_ALIGN:
        raise ValueError(f"{name}: size must be a multiple of {CHUNK_ALIGN} for several chunks, got {size}")
    return size
