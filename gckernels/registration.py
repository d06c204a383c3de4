"""Registration of compressors in the tables and, for codecs, definition of their torch ops.

The ops are ``torch.ops.gckernels.<name>_encode``, ``_decode`` and ``_recode``. They are defined by ``Library.define``
and ``impl``, which cost about 5 us per call where ``custom_op`` costs at least 20: a synchronisation calls an op once
per tensor. Tensors on the CPU take the host path, those on an accelerator the Triton launchers. Every op checks its
arguments first.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .arguments import check_decode, check_encode, check_like, check_recode
from .codec import CODECS, Codec, Decoding, Encoding, Recoding
from .compressor import COMPRESSORS, Compressor
from .devices import ACCELERATOR_KEYS

M = TypeVar("M", bound=type[Compressor])


def register(cls: M) -> M:
    """Class decorator: put a frozen dataclass into :data:`COMPRESSORS`; a codec into :data:`CODECS` as well, with its
    torch ops.

    Raises:
        ValueError: the name is taken.
        TypeError: not a frozen dataclass, or a codec's field that an op cannot take.
    """
    if cls.__name__ in COMPRESSORS:
        raise ValueError(f"a compressor named {cls.__name__} is registered already")
    params = getattr(cls, "__dataclass_params__", None)
    if params is None or not params.frozen or cls.__dict__.get("__dataclass_fields__") is None:
        raise TypeError(f"{cls.__name__} must be a frozen dataclass to be registered")
    if issubclass(cls, Codec):
        define_ops(cls)
        CODECS[cls.__name__] = cls
    COMPRESSORS[cls.__name__] = cls
    return cls


# -------------------------------------------------------------------- torch ops

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


def _encode(compressor, backend, grad, residual, payload, seed, scale, size) -> None:
    payload, size = check_encode(compressor, grad, residual, payload, scale, size)
    backend.encode(Encoding(compressor, grad, residual, payload, seed, size), scale)


def _decode(compressor, backend, payloads, out, scale, accumulate, size) -> None:
    payloads, size = check_decode(compressor, payloads, out, size)
    backend.decode(Decoding(compressor, payloads, out, size), scale, accumulate)


def _recode(compressor, backend, payloads, residual, payload, numel, scale, seed, size) -> None:
    size = check_recode(compressor, payloads, residual, payload, numel, size)
    backend.recode(Recoding(compressor, payloads, residual, payload, numel, seed, size), scale)


@dataclasses.dataclass(frozen=True)
class _Verb:
    """One of the three ops that every compressor has.

    Attributes:
        name: ``"encode"``, ``"decode"`` or ``"recode"``.
        unit: schema of the arguments before the configuration: the tensors, and ``numel``.
        settings: schema of the arguments after it. These and sizes are ``SymInt`` where they may change from call to
            call, so that a compiled function is compiled once for all of them.
        defaults: default values of ``settings``.
        tensors: names of the tensors in ``unit``, in order.
        main: the tensor among them whose device the others must be on.
        run: takes the compressor, its back end, the unit and the settings.
    """

    name: str
    unit: str
    settings: str
    defaults: tuple[Any, ...]
    tensors: tuple[str, ...]
    main: str
    run: Callable[..., None]


_VERBS = (
    _Verb(
        name="encode",
        unit="Tensor grad, Tensor(a!)? residual, Tensor(b!) payload",
        settings="SymInt seed=0, float scale=1.0, SymInt? size=None",
        defaults=(0, 1.0, None),
        tensors=("grad", "residual", "payload"),
        main="grad",
        run=_encode,
    ),
    _Verb(
        name="decode",
        unit="Tensor payloads, Tensor(a!) out",
        settings="float scale=1.0, bool accumulate=False, SymInt? size=None",
        defaults=(1.0, False, None),
        tensors=("payloads", "out"),
        main="out",
        run=_decode,
    ),
    _Verb(
        name="recode",
        unit="Tensor payloads, Tensor(a!)? residual, Tensor(b!) payload, SymInt numel",
        settings="float scale=1.0, SymInt seed=0, SymInt? size=None",
        defaults=(1.0, 0, None),
        tensors=("payloads", "residual", "payload"),
        main="payloads",
        run=_recode,
    ),
)


def define_ops(cls: type[Codec]) -> None:
    """Define, implement and fake the three ops of ``cls``.

    Sets ``op_name``, ``"efsignsgd"`` for ``EFSignSGD``, ``encode_op``, ``decode_op``, ``recode_op`` and
    ``config_fields``.

    Raises:
        TypeError: a field of a type that an op cannot take, or with the name of another argument; a missing back end.
    """
    fields = dataclasses.fields(cls)
    schema = "".join(f"{_schema_type(cls, field)} {field.name}, " for field in fields)
    for name in ("host", "triton"):
        if inspect.getattr_static(cls, name, None) is None:
            raise TypeError(f"{cls.__name__} must have the back end {name!r} to be registered")
    cls.op_name = cls.__name__.lower()
    cls.config_fields = tuple(field.name for field in fields)
    for verb in _VERBS:
        op = f"{cls.op_name}_{verb.name}"
        _library.define(f"{op}({verb.unit}, {schema}{verb.settings}) -> ()")
        implementation = _implementation(verb, cls)
        for key in ("CPU", *ACCELERATOR_KEYS):
            _library.impl(op, implementation, key)
        torch.library.register_fake(f"gckernels::{op}", _fake(verb, cls.__name__), lib=_library)
        setattr(cls, f"{verb.name}_op", getattr(torch.ops.gckernels, op).default)


def _implementation(verb: _Verb, cls: type[Codec]) -> Callable[..., None]:
    """``verb`` as the dispatcher calls it: with the unit, the fields of the configuration, the settings."""
    first = verb.unit.count(",") + 1
    behind = first + len(cls.config_fields)
    run, defaults, build = verb.run, verb.defaults, functools.cache(cls)

    def implemented(*given: Any) -> None:
        compressor = build(*given[first:behind])
        settings = (
            *given[behind:],
            *defaults[len(given) - behind :],
        )  # the dispatcher omits arguments that have their default values
        run(compressor, cls.backend(given[0].device), *given[:first], *settings)

    return implemented


def _fake(verb: _Verb, cls_name: str) -> Callable[..., None]:
    """``verb`` without memory: the ops return nothing and only write into their arguments. It also serves the meta
    device, and a call that mixes it with another one lands here: it must not pass for done."""

    def fake(*given: Any) -> None:
        tensors = dict(zip(verb.tensors, given, strict=False))
        main = tensors.pop(verb.main)
        for argument, tensor in tensors.items():
            if tensor is not None:
                check_like(f"{cls_name}.{verb.name}", argument, tensor, main)

    return fake


def _schema_type(cls: type[Codec], field: dataclasses.Field[Any]) -> str:
    if field.name in _OP_ARGUMENTS:
        raise TypeError(f"{cls.__name__}.{field.name}: the ops have an argument of this name")
    written = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    written = "torch.dtype" if written == "dtype" else written
    if written not in _SCHEMA_TYPES:
        allowed = ", ".join(_SCHEMA_TYPES)
        raise TypeError(f"{cls.__name__}.{field.name}: a field is one of {allowed}, not {written}")
    return _SCHEMA_TYPES[written]
