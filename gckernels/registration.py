"""From a compressor class to its torch ops, ``torch.ops.gckernels.<name>_encode``, ``_decode`` and ``_recode``.

Plain ``Library.define`` and ``impl`` are used because they cost about 5 us a call where ``custom_op`` costs 20 and
more, and a synchronisation calls them once per tensor. The dispatcher chooses: CPU tensors take the host path, CUDA
tensors the Triton launchers. Every op checks its arguments first, whoever calls it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from .compressor import CHUNK_ALIGN, GRAD_DTYPES, Compressor, chunk_numel
from .toolkit.payload import ALIGN_NBYTES

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


_OP_ARGUMENTS = {"grad", "residual", "payload", "payloads", "out", "numel", "seed", "scale", "size", "accumulate"}
_FUNCTION_ARGUMENTS = {"chunks", "shape", "out_dtype"}


def define_ops(cls: type[Compressor]) -> None:
    """Define, implement and fake the three ops of ``cls``.

    Sets ``op_name``, ``"efsignsgd"`` for ``EFSignSGD``, ``encode_op``, ``decode_op``, ``recode_op`` and
    ``config_fields``. What changes from call to call, and what follows from sizes, is ``SymInt`` in the schemas, so
    that a compiled function is compiled once for all of them.

    Raises:
        TypeError: a field of a type that an op cannot take, or with the name of another argument.
    """
    cls.op_name = cls.__name__.lower()
    fields = dataclasses.fields(cls)
    config = "".join(f"{_schema_type(cls, field)} {field.name}, " for field in fields)
    encode, decode, recode = (f"{cls.op_name}_{verb}" for verb in ("encode", "decode", "recode"))
    _library.define(
        f"{encode}(Tensor grad, Tensor(a!)? residual, Tensor(b!) payload, {config}SymInt seed=0, "
        "float scale=1.0, SymInt? size=None) -> ()"
    )
    _library.define(
        f"{decode}(Tensor payloads, Tensor(a!) out, {config}float scale=1.0, bool accumulate=False, "
        "SymInt? size=None) -> ()"
    )
    _library.define(
        f"{recode}(Tensor payloads, Tensor(a!)? residual, Tensor(b!) payload, SymInt numel, {config}float scale=1.0, "
        "SymInt seed=0, SymInt? size=None) -> ()"
    )

    @functools.cache
    def build(*values: Any) -> Compressor:
        return cls(*values)

    # the dispatcher leaves out trailing arguments that equal their defaults
    defaults = tuple(field.default for field in fields)
    encode_defaults, decode_defaults = (*defaults, 0, 1.0, None), (*defaults, 1.0, False, None)
    recode_defaults = (*defaults, 1.0, 0, None)

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

    def recode_with(implementation: str, payloads: Any, residual: Any, payload: Any, numel: int, *rest: Any) -> None:
        arguments = (*rest, *recode_defaults[len(rest) :])
        compressor = build(*arguments[: len(fields)])
        scale, seed, size = arguments[len(fields) :]
        size = check_recode(compressor, payloads, residual, payload, numel, size)
        getattr(compressor, implementation)(payloads, residual, payload, numel, size, scale, seed)

    for key, place in (("CPU", "host"), ("CUDA", "triton")):
        _library.impl(encode, functools.partial(encode_with, f"encode_{place}"), key)
        _library.impl(decode, functools.partial(decode_with, f"decode_{place}"), key)
        _library.impl(recode, functools.partial(recode_with, f"recode_{place}"), key)

    # The ops return nothing and only write into their arguments. The fakes also serve the meta device, and a call that
    # mixes it with another one lands here: it must not pass for done.
    def encode_fake(grad: Any, residual: Any, payload: Any, *_: Any) -> None:
        if residual is not None:
            _check_like(f"{cls.__name__}.encode", "residual", residual, grad)
        _check_like(f"{cls.__name__}.encode", "payload", payload, grad)

    def decode_fake(payloads: Any, out: Any, *_: Any) -> None:
        _check_like(f"{cls.__name__}.decode", "payloads", payloads, out)

    def recode_fake(payloads: Any, residual: Any, payload: Any, *_: Any) -> None:
        if residual is not None:
            _check_like(f"{cls.__name__}.recode", "residual", residual, payloads)
        _check_like(f"{cls.__name__}.recode", "payload", payload, payloads)

    torch.library.register_fake(f"gckernels::{encode}", encode_fake, lib=_library)
    torch.library.register_fake(f"gckernels::{decode}", decode_fake, lib=_library)
    torch.library.register_fake(f"gckernels::{recode}", recode_fake, lib=_library)

    cls.config_fields = tuple(field.name for field in fields)
    cls.encode_op, cls.decode_op, cls.recode_op = (
        getattr(torch.ops.gckernels, name).default for name in (encode, decode, recode)
    )


def _schema_type(cls: type[Compressor], field: dataclasses.Field[Any]) -> str:
    if field.name in _OP_ARGUMENTS | _FUNCTION_ARGUMENTS:
        raise TypeError(f"{cls.__name__}.{field.name}: the ops and functions have an argument of this name")
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
        if residual.numel() != compressor.states * grad.numel():
            each = f", of which the residual holds {compressor.states} times as many" if compressor.states > 1 else ""
            raise ValueError(f"{name}: residual has {residual.numel()} elements, grad has {grad.numel()}{each}")
    if scale != 1.0 and not compressor.summable:
        raise ValueError(f"{name}: scale must be 1.0 for a compressor that is not summable, got {scale}")
    _check_payload(name, "payload", payload, (1, 2))
    _check_like(name, "payload", payload, grad)
    rows = payload if payload.dim() == 2 else payload.unsqueeze(0)
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
        payloads = payloads.view(1, 1, -1)
    elif payloads.dim() == 2:
        payloads = payloads.unsqueeze(1)
    _, chunks, nbytes = payloads.shape
    return payloads, _chunk_size(name, "payloads", compressor, out.numel(), chunks, nbytes, size)


def check_recode(
    compressor: Compressor,
    payloads: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    numel: int,
    size: int | None,
) -> int:
    """Check the arguments of ``recode``; the size that the payloads are laid out for."""
    name = f"{compressor.name}.recode"
    if numel < 0:
        raise ValueError(f"{name}: numel must not be negative, got {numel}")
    _check_payload(name, "payloads", payloads, (2,))
    _check_payload(name, "payload", payload, (1,))
    _check_like(name, "payload", payload, payloads)
    if residual is not None:
        _check_vector(name, "residual", residual, (torch.float32,))
        _check_like(name, "residual", residual, payloads)
        states = compressor.of_shard.states
        if residual.numel() != states * numel:
            each = f", of which the residual holds {states} times as many" if states > 1 else ""
            raise ValueError(f"{name}: residual has {residual.numel()} elements, numel is {numel}{each}")
    _chunk_size(name, "payload", compressor, numel, 1, payload.numel(), size)
    return _chunk_size(name, "payloads", compressor, numel, 1, payloads.shape[1], size)


def _check_vector(name: str, argument: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: {argument} must be {allowed}, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: {argument} must be a contiguous vector, got shape {shape} with strides {stride}")


def _check_like(name: str, argument: str, tensor: torch.Tensor, grad: torch.Tensor) -> None:
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
    name: str, argument: str, compressor: Compressor, numel: int, chunks: int, nbytes: int, size: int | None
) -> int:
    size = resolve_size(name, argument, numel, chunks, size)
    wanted = compressor.payload_nbytes(size)
    if nbytes != wanted:
        raise ValueError(
            f"{name}: {argument} has {nbytes} bytes per chunk; {numel} elements in {chunks} chunk(s) of {size} "
            f"need {wanted}"
        )
    return size


def resolve_size(name: str, argument: str, numel: int, chunks: int, size: int | None) -> int:
    """Elements that each of ``chunks`` payloads of a unit of ``numel`` is laid out for, where the caller said ``size``.

    Raises:
        ValueError: naming ``size``, or ``argument`` when it is ``chunks`` that cannot be.
    """
    if chunks < 1:
        raise ValueError(f"{name}: {argument} must have at least one chunk, got {chunks}")
    if size is None:
        return chunk_numel(numel, chunks)
    if size * chunks < numel:
        raise ValueError(f"{name}: size {size} leaves no room for {numel} elements in {chunks} chunk(s)")
    if chunks > 1 and size % CHUNK_ALIGN:
        raise ValueError(f"{name}: size must be a multiple of {CHUNK_ALIGN} for several chunks, got {size}")
    return size
