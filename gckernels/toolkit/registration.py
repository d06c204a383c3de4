"""From a compressor class to its torch ops, ``torch.ops.gckernels.<name>_encode`` and ``<name>_decode``.

Plain ``Library.define`` and ``impl`` are used because they cost about 5 us a call where ``custom_op`` costs 20 and
more, and a synchronisation calls them once per tensor. The dispatcher chooses: CPU tensors take the host path, CUDA
tensors the Triton launchers. Every op checks its arguments first, whoever calls it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import torch

from ..compressor import GRAD_DTYPES, Compressor, chunk_numel

_library = torch.library.Library("gckernels", "FRAGMENT")

_SCHEMA_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "int | None": "int?",
    "float | None": "float?",
    "torch.dtype": "ScalarType",
}


def snake_case(name: str) -> str:
    """``"EFSignSGD"`` to ``"ef_sign_sgd"``, ``"ChunkTopK"`` to ``"chunk_top_k"``, ``"Cast16"`` to ``"cast16"``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def define_ops(cls: type[Compressor]) -> None:
    """Define, implement and fake the two ops of ``cls``; sets ``cls.op_name``."""
    cls.op_name = snake_case(cls.__name__)
    fields = dataclasses.fields(cls)
    config = "".join(f"{_schema_type(cls, field)} {field.name}, " for field in fields)
    encode, decode = f"{cls.op_name}_encode", f"{cls.op_name}_decode"
    _library.define(
        f"{encode}(Tensor grad, Tensor(a!)? residual, Tensor(b!) payload, {config}int seed=0, "
        "float scale=1.0, int? size=None) -> ()"
    )
    _library.define(
        f"{decode}(Tensor payloads, Tensor(a!) out, {config}float scale=1.0, bool accumulate=False, "
        "int? size=None) -> ()"
    )

    @functools.cache
    def build(*values: Any) -> Compressor:
        return cls(*values)

    # the dispatcher leaves out trailing arguments that equal their defaults
    defaults = tuple(field.default for field in fields)
    encode_defaults, decode_defaults = (*defaults, 0, 1.0, None), (*defaults, 1.0, False, None)

    def encode_with(implementation: str, grad: Any, residual: Any, payload: Any, *rest: Any) -> None:
        arguments = (*rest, *encode_defaults[len(rest) :])
        compressor = build(*arguments[: len(fields)])
        seed, scale, size = arguments[len(fields) :]
        payload, size = check_encode(compressor, grad, residual, payload, scale, size)
        getattr(compressor, implementation)(grad, residual, payload, size, seed, scale)

    def decode_with(implementation: str, payloads: Any, out: Any, *rest: Any) -> None:
        arguments = (*rest, *decode_defaults[len(rest) :])
        compressor = build(*arguments[: len(fields)])
        scale, accumulate, size = arguments[len(fields) :]
        payloads, size = check_decode(compressor, payloads, out, size)
        getattr(compressor, implementation)(payloads, out, size, scale, accumulate)

    for key, place in (("CPU", "host"), ("CUDA", "triton")):
        _library.impl(encode, functools.partial(encode_with, f"encode_{place}"), key)
        _library.impl(decode, functools.partial(decode_with, f"decode_{place}"), key)

    # Both ops return nothing and only write into their arguments. The fakes also serve the meta device, and a call that
    # mixes it with another one lands here: it must not pass for done.
    def encode_fake(grad: Any, residual: Any, payload: Any, *_: Any) -> None:
        if residual is not None:
            _check_like(f"{cls.__name__}.encode", "residual", residual, grad)
        _check_like(f"{cls.__name__}.encode", "payload", payload, grad)

    def decode_fake(payloads: Any, out: Any, *_: Any) -> None:
        _check_like(f"{cls.__name__}.decode", "payloads", payloads, out)

    torch.library.register_fake(f"gckernels::{encode}", encode_fake, lib=_library)
    torch.library.register_fake(f"gckernels::{decode}", decode_fake, lib=_library)


def _schema_type(cls: type[Compressor], field: dataclasses.Field[Any]) -> str:
    written = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    written = "torch.dtype" if written == "dtype" else written
    if written not in _SCHEMA_TYPES:
        allowed = ", ".join(_SCHEMA_TYPES)
        raise TypeError(f"{cls.__name__}.{field.name}: a field is one of {allowed}, not {written}")
    return _SCHEMA_TYPES[written]


# -------------------------------------------------------------------- argument checks


def check_encode(
    compressor: Compressor,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    scale: float,
    size: int | None,
) -> tuple[torch.Tensor, int]:
    """Check the arguments of ``encode``; the payload as ``[chunks, nbytes]`` and the size of a chunk."""
    name = f"{compressor.name}.encode"
    _check_vector(name, "grad", grad, GRAD_DTYPES)
    if residual is not None:
        _check_vector(name, "residual", residual, (torch.float32,))
        _check_like(name, "residual", residual, grad)
        if residual.numel() != grad.numel():
            raise ValueError(f"{name}: residual has {residual.numel()} elements, grad has {grad.numel()}")
    if scale != 1.0 and not compressor.summable:
        raise ValueError(f"{name}: scale must be 1.0 for a compressor that is not summable, got {scale}")
    _check_payload(name, "payload", payload, (1, 2))
    _check_like(name, "payload", payload, grad)
    rows = payload if payload.dim() == 2 else payload[None, :]
    return rows, _chunk_size(name, "payload", compressor, grad.numel(), rows.shape[0], rows.shape[1], size)


def check_decode(
    compressor: Compressor, payloads: torch.Tensor, out: torch.Tensor, size: int | None
) -> tuple[torch.Tensor, int]:
    """Check the arguments of ``decode``; the payloads as ``[sources, chunks, nbytes]`` and the size of a chunk."""
    name = f"{compressor.name}.decode"
    _check_vector(name, "out", out, GRAD_DTYPES)
    _check_payload(name, "payloads", payloads, (1, 2, 3))
    _check_like(name, "payloads", payloads, out)
    if payloads.dim() == 1:
        payloads = payloads[None, None, :]
    elif payloads.dim() == 2:
        payloads = payloads[:, None, :]
    chunks, nbytes = payloads.shape[1:]
    return payloads, _chunk_size(name, "payloads", compressor, out.numel(), chunks, nbytes, size)


def _check_vector(name: str, argument: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: {argument} must be {allowed}, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: {argument} must be a contiguous vector, got shape {shape} with strides {stride}")


def _check_like(name: str, argument: str, tensor: torch.Tensor, grad: torch.Tensor) -> None:
    if tensor.device != grad.device:
        raise ValueError(f"{name}: {argument} is on {tensor.device}, the gradient on {grad.device}")


def _check_payload(name: str, argument: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"{name}: {argument} must be torch.uint8, got {tensor.dtype}")
    if tensor.dim() not in dims:
        raise ValueError(f"{name}: {argument} must have {' or '.join(map(str, dims))} dimensions, got {tensor.dim()}")
    strides = tensor.stride()
    aligned = tensor.storage_offset() % 16 == 0 and all(stride % 16 == 0 for stride in strides[:-1])
    if (tensor.shape[-1] > 1 and strides[-1] != 1) or not aligned:
        raise ValueError(
            f"{name}: {argument} must be contiguous in its last dimension and 16-byte aligned in the others, got "
            f"strides {strides} and storage offset {tensor.storage_offset()}"
        )


def _chunk_size(
    name: str, argument: str, compressor: Compressor, numel: int, chunks: int, nbytes: int, size: int | None
) -> int:
    if chunks < 1:
        raise ValueError(f"{name}: {argument} must have at least one chunk, got {chunks}")
    if size is None:
        size = chunk_numel(numel, chunks)
    elif size * chunks < numel:
        raise ValueError(f"{name}: size {size} leaves no room for {numel} elements in {chunks} chunk(s)")
    wanted = compressor.payload_nbytes(size)
    if nbytes != wanted:
        raise ValueError(
            f"{name}: {argument} has {nbytes} bytes per chunk; {numel} elements in {chunks} chunk(s) of {size} "
            f"need {wanted}"
        )
    return size
