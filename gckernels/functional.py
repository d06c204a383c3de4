"""The compressors as functions: ``onebit_encode``, ``onebit_decode`` and ``onebit_recode`` for ``OneBit``, and so on.

They take tensors of any shape and return what the methods of :class:`~gckernels.Compressor` write into their
arguments; the fields of the compressor are keyword arguments. The decorator ``register`` makes them, for compressors
of users as well, and the package finds them here: ``gckernels.onebit_encode``. ``docs/operators.md`` shows how to use
them.

``torch.compile`` traces them, down to one op each, and without a graph break.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arguments import resolve_size
from .compressor import GRAD_DTYPES, Compressor
from .toolkit.fields import as_dtype
from .toolkit.values import as_int, as_shape, as_size, require_tensors

_MOST_CHUNKS = 2**31 - 1

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}
"""Every function by name."""

_ENCODE = """Encode ``grad``, a tensor of any shape, with :class:`{cls}`: {summary}

With ``p = grad + residual`` the payload is ``C(scale * p)``, and the residual becomes ``p - D(payload) / scale``.

Args:
    grad: of any shape, contiguous, fp32, bf16 or fp16.
    residual: what earlier calls left to send, fp32, of the shape of ``grad`` (or ``[states, *grad.shape]``, for
        compressors with several ``states``), contiguous, changed in place; zeros at first. ``None`` for no error
        feedback.
    chunks: number of parts that ``grad``, seen as a vector, is cut into (:func:`gckernels.chunk_numel` elements each),
        with a payload of its own for every part.
    seed: of the stochastic compressors, 64 bits: from ``-2**63`` to ``2**64 - 1``. The same seed gives the same bytes.
    scale: factor on what is sent; summable compressors only.
    size: elements that every payload is laid out for; by default as many as it holds. More than that for a short shard
        whose payload must be as large as the others'.
    config: the fields of :class:`{cls}`{fields}.

Returns:
    The payload, ``uint8 [nbytes]`` or, with several chunks, ``[chunks, nbytes]``, where ``nbytes`` is
    ``{cls}(...).payload_nbytes(size)``.

Raises:
    TypeError, ValueError: naming the argument; nothing has been changed.
"""

_DECODE = """Decode what :func:`{name}_encode` returned; several payloads are merged: ``scale`` times the sum.

Args:
    payloads: ``uint8``, as encoded, ``[nbytes]`` or ``[chunks, nbytes]``, or those of several sources,
        ``[sources, nbytes]`` or ``[sources, chunks, nbytes]``.
    shape: of the result, a sequence, or an int for a vector. Not needed with ``out``.
    chunks: as in :func:`{name}_encode`; not needed for payloads of three dimensions.
    scale: factor on the sum, ``1 / sources`` for the mean.
    out: tensor to write into, of any shape, contiguous, fp32, bf16 or fp16.
    out_dtype: of the result, fp32, bf16 or fp16, as a dtype or its name; by default fp32, or that of ``out``. Sums are
        made in fp32 always.
    accumulate: add to what ``out`` holds.
    size: as in :func:`{name}_encode`.
    config: the fields of :class:`{cls}`{fields}.

Returns:
    ``out``, or a new tensor.

Raises:
    TypeError, ValueError: naming the argument; nothing has been changed.
"""

_RECODE = """Decode, merge and encode again, as the owner of a shard does.

Bit for bit :func:`{name}_decode` to fp32 and :func:`{name}_encode` of that, without the vector in between where the
algorithm allows.

Args:
    payloads: ``uint8 [sources, nbytes]``.
    residual: as in :func:`{name}_encode`, for ``numel`` elements, or ``None``. What encodes is ``of_shard``.
    numel: elements of the shard.
    scale: factor on the sum, ``1 / sources`` for the mean.
    seed: as in :func:`{name}_encode`.
    size: elements that every payload is laid out for, at least ``numel``; by default ``numel``.
    config: the fields of :class:`{cls}`{fields}.

Returns:
    The payload, ``uint8 [nbytes]``.

Raises:
    TypeError, ValueError: naming the argument; nothing has been changed.
"""


def define_functions(cls: type[Compressor]) -> None:
    """Make the three functions of ``cls``, whose ops are defined, and put them into :data:`FUNCTIONS`."""
    name = cls.op_name

    @functools.lru_cache(typed=True)  # 4.0 and True are equal to integers, and are not configurations
    def cached(**config: Any) -> Compressor:
        return cls(**config)

    def build(config: dict[str, Any]) -> Compressor:
        if torch.compiler.is_compiling():  # torch.compile looks through a cache, and warns that it does
            return cls(**config)
        try:
            return cached(**config)
        except TypeError:  # a value that cannot be hashed: the compressor's own error is better
            return cls(**config)

    def encode(
        grad: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        chunks: int = 1,
        seed: int = 0,
        scale: float = 1.0,
        size: int | None = None,
        **config: Any,
    ) -> torch.Tensor:
        compressor = build(config)
        chunks, size = as_int(f"{name}_encode", "chunks", chunks, 1, _MOST_CHUNKS), as_size(f"{name}_encode", size)
        vector, kept = _vector(f"{name}_encode", "grad", grad), None
        if residual is not None:
            kept = _vector(f"{name}_encode", "residual", residual)
            wanted = grad.shape if compressor.states == 1 else (compressor.states, *grad.shape)
            if residual.shape != wanted:
                shapes = f"{tuple(wanted)}, got {tuple(residual.shape)}"
                several = f"{compressor.states} times " if compressor.states > 1 else ""
                raise ValueError(f"{name}_encode: residual must have {several}the shape of grad, {shapes}")
        size = resolve_size(f"{name}_encode", "chunks", vector.numel(), chunks, size)
        nbytes = compressor.payload_nbytes(size)
        payload = torch.empty(nbytes if chunks == 1 else (chunks, nbytes), dtype=torch.uint8, device=grad.device)
        compressor.encode(vector, kept, payload, seed, scale, size)
        return payload

    def decode(
        payloads: torch.Tensor,
        shape: int | Sequence[int] | None = None,
        *,
        chunks: int = 1,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | str | None = None,
        accumulate: bool = False,
        size: int | None = None,
        **config: Any,
    ) -> torch.Tensor:
        compressor = build(config)
        require_tensors(f"{name}_decode", payloads=payloads)
        chunks = as_int(f"{name}_decode", "chunks", chunks, 1, _MOST_CHUNKS)
        shape = None if shape is None else as_shape(f"{name}_decode", shape)
        out_dtype = None if out_dtype is None else _out_dtype(f"{name}_decode", out_dtype)
        if chunks != 1:
            payloads = _with_chunks(f"{name}_decode", payloads, chunks)
        if out is None:
            if shape is None:
                raise TypeError(f"{name}_decode: shape must be given, or out")
            if accumulate:
                raise ValueError(f"{name}_decode: accumulate needs out, to add to")
            out = torch.empty(shape, dtype=out_dtype or torch.float32, device=payloads.device)
        else:
            _check_out(f"{name}_decode", out, shape, out_dtype)
        compressor.decode(payloads, _vector(f"{name}_decode", "out", out), scale, accumulate, size)
        return out

    def recode(
        payloads: torch.Tensor,
        residual: torch.Tensor | None,
        numel: int,
        *,
        scale: float = 1.0,
        seed: int = 0,
        size: int | None = None,
        **config: Any,
    ) -> torch.Tensor:
        compressor = build(config)
        require_tensors(f"{name}_recode", payloads=payloads)
        numel, size = as_int(f"{name}_recode", "numel", numel, 0), as_size(f"{name}_recode", size)
        kept = None if residual is None else _vector(f"{name}_recode", "residual", residual)
        size = resolve_size(f"{name}_recode", "payloads", numel, 1, size)
        payload = torch.empty(compressor.payload_nbytes(size), dtype=torch.uint8, device=payloads.device)
        compressor.recode(payloads, kept, payload, numel, scale, seed, size)
        return payload

    for function, text in ((encode, _ENCODE), (decode, _DECODE), (recode, _RECODE)):
        _dress(function, cls, text)
        FUNCTIONS[function.__name__] = function


def _dress(function: Any, cls: type[Compressor], text: str) -> None:
    """Give ``function`` the name, the documentation and the signature of a function written for ``cls`` alone."""
    name, fields = f"{cls.op_name}_{function.__name__}", dataclasses.fields(cls)
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    for field in fields:
        given = {} if field.default is dataclasses.MISSING else {"default": field.default}
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=field.type, **given))
    function.__signature__ = signature.replace(parameters=parameters)
    listed = ", ".join(f"``{field.name}``" for field in fields)
    function.__doc__ = text.format(
        name=cls.op_name,
        cls=cls.__name__,
        fields=f", {listed}" if fields else ", of which there are none",
        summary=(cls.__doc__ or "").strip().partition("\n")[0].replace(" (see the module's docstring)", ""),
    )
    function.__module__, function.__name__, function.__qualname__ = __package__, name, name
    # tracebacks, and the count of recompilations that torch.compile keeps for every code object, tell them apart
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)


# -------------------------------------------------------------------- arguments


def _vector(name: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` as a vector on the same memory."""
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
        raise TypeError(f"{name}: out is {out.dtype}, out_dtype {dtype}")
    if shape is not None and tuple(out.shape) != shape:
        raise ValueError(f"{name}: out has the shape {tuple(out.shape)}, shape is {shape}")
