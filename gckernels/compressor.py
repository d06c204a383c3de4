"""The base class of all compressors, its traits, and the table of compressors.

A compressor is a frozen configuration with a name. It states its properties (biased, summable, number of rounds) and
the number of bytes it sends. A *codec*, which turns a vector into a payload and back, derives from
:class:`~gckernels.Codec`. A compressor that computes between its collectives, such as :class:`~gckernels.PowerSGD`,
derives from :class:`Compressor` directly.
"""

from __future__ import annotations

import ast
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from .toolkit.fields import as_dtype, shown


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of a compressor that its users rely on: programs, plans, tests.

    Attributes:
        summable: payloads can be added element by element, so an allreduce can send them.
        payload_dtype: dtype in which the payloads of a summable compressor are added.
        needs_feedback: the compressor is biased, and training needs the residual of error feedback.
        stochastic: payloads depend on a seed.
        unbiased: the mean over all seeds of a finite gradient's decodings is that gradient, to the resolution of the
            random numbers.
        conserves: with a residual, the decoded gradient plus the new residual is the gradient plus the old residual.
            For a compressor of several rounds, to whose result all ranks contribute, this holds for means over ranks.
        states: number of vectors in the residual, concatenated, each as long as the gradient. Encoding uses all of
            them.
        applies_momentum: decoded gradients already contain a momentum, which replaces the optimizer's.
        averages: several payloads merge to ``scale`` times the sum of their decodings; otherwise to a result that the
            compressor defines, such as a majority vote.
    """

    summable: bool = False
    payload_dtype: torch.dtype = torch.uint8
    needs_feedback: bool = False
    stochastic: bool = False
    unbiased: bool = False
    conserves: bool = True
    states: int = 1
    applies_momentum: bool = False
    averages: bool = True


_NO_TRAITS = Traits()


@dataclasses.dataclass(frozen=True)
class Compressor(ABC):
    """Base of all compressors. Subclasses are frozen dataclasses whose fields are the configuration."""

    name: ClassVar[str] = "Compressor"
    """Key in the table of compressors: the name of the class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__name__

    @property
    def traits(self) -> Traits:
        """The properties of the compressor.

        A subclass states them as ``traits = Traits(needs_feedback=True)`` or, if they depend on its fields, as a
        property.
        """
        return _NO_TRAITS

    @property
    def rounds(self) -> int:
        """Number of encode-communicate rounds per synchronisation."""
        return 1

    @abstractmethod
    def round_nbytes(self, numel: int, index: int) -> int:
        """Bytes that a rank contributes in round ``index``, counted from 0, for a unit of ``numel`` elements.

        The number is a multiple of 16 or, if it is a mean over different steps, of 8.

        Raises:
            ValueError: this configuration cannot encode a unit of this size.
        """

    def fit(self, shape: Sequence[int]) -> Compressor:
        """The compressor for a parameter of this shape, by default this compressor.

        Args:
            shape: dimensions of the parameter, in the order of its memory.
        """
        return self

    @property
    def shard_compressor(self) -> Compressor:
        """The compressor with which the owner of a shard encodes the merged shard, by default this compressor.

        Its payloads have the same size and format and merge in the same way, so both compressors can decode them.
        """
        return self

    @property
    def schedule(self) -> tuple[tuple[int, Compressor], ...]:
        """The compressors that encode gradients during training, as pairs ``(first step, compressor)`` in order.

        The first pair starts at step 0. All compressors have the same states. By default this is the only one.
        """
        return ((0, self),)

    def at_step(self, step: int) -> Compressor:
        """The compressor of a training step, counted from the first compressed step, which is 0."""
        return [compressor for first, compressor in self.schedule if first <= step][-1]

    def factor_sizes(self, numel: int) -> dict[str, int]:
        """Numbers of elements, by kind, of the vectors that the compressor keeps per unit beside the residual."""
        return {}

    def arithmetic(self, device: torch.device) -> str:
        """A description of what the bits of this compressor's results depend on besides its arguments, by default of
        nothing.

        Ranks that compute the same numbers for themselves need the same description.

        Args:
            device: the device of the gradients.
        """
        return ""

    def compile_host(self, recodes: bool = False) -> None:  # noqa: B027, many have nothing to compile
        """Compile or load the functions of this compressor's CPU path, so that no later call waits for a compiler.

        By default there is nothing to compile.

        Args:
            recodes: whether to include the functions of ``Codec.recode``.
        """

    def to_json(self) -> dict[str, Any]:
        """The configuration as a dict for JSON, e.g. ``{"name": "BlockQuant", "bits": 4, "block": 256}``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"name": self.name} | {key: _plain(value) for key, value in values.items()}


COMPRESSORS: dict[str, type[Compressor]] = {}
"""Every compressor by name, for reading plans and command lines."""

MAX_JSON_DEPTH = 32
"""Maximum nesting of lists and objects in JSON. No plan or configuration needs more, and Python can neither print nor
compare very deep ones."""

_DTYPE_TYPES = (torch.dtype, "torch.dtype")  # as a class, and as text where annotations are postponed (PEP 563)


def from_json(record: dict[str, Any]) -> Compressor:
    """The compressor with the configuration ``record``, as :meth:`Compressor.to_json` writes it.

    Raises:
        ValueError: unknown name or field, or a value that the compressor refuses.
    """
    if too_deep(record):
        raise ValueError(f"compressor: more than {MAX_JSON_DEPTH} levels of nested lists and objects")
    if not isinstance(record, dict) or "name" not in record:
        raise ValueError(f"compressor: expected an object with a 'name', got {shown(record)}")
    fields = {key: value for key, value in record.items() if key != "name"}
    return _build(record["name"], fields)


def too_deep(record: Any) -> bool:
    """Whether ``record`` has more than :data:`MAX_JSON_DEPTH` levels of nested lists and objects."""
    level = [record]
    for _ in range(MAX_JSON_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        distinct = {id(value): value for values in inside if isinstance(values, Iterable) for value in values}
        level = [value for value in distinct.values() if isinstance(value, dict | list | tuple)]
    return bool(level)


def from_spec(spec: str) -> Compressor:
    """The compressor that ``spec`` names, such as ``"EFSignSGD"`` or ``"BlockQuant(bits=4, block=256)"``.

    Only keyword arguments with literal values are allowed; nothing is evaluated. A dtype is given by its name:
    ``"Cast16(dtype='float16')"``, ``"Cast16(dtype=fp16)"`` or ``"Cast16(dtype=torch.float16)"``.

    >>> gckernels.from_spec("TopK(ratio=0.05)")
    TopK(ratio=0.05, value_bits=32)

    Raises:
        TypeError: ``spec`` is not a string.
        ValueError: ``spec`` has another form, an unknown name or field, or a value that the compressor refuses.
    """
    if not isinstance(spec, str):
        raise TypeError(f"compressor: a spec must be a string such as 'BlockQuant(bits=4)', got {type(spec).__name__}")
    try:
        name, fields = _read_spec(spec)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        short = spec if len(spec) <= 200 else spec[:200] + "..."
        raise ValueError(f"compressor: expected Name or Name(field=value, ...), got {short!r}") from error
    return from_json({"name": name} | fields)


def _read_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the fields in ``spec``; raises an error if it has another form."""
    node = ast.parse(spec.strip(), mode="eval").body
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("must be a name or a call")
    fields = {str(word.arg): _literal(word.value) for word in node.keywords}
    if len(fields) != len(node.keywords) or "name" in fields:
        raise ValueError("a field is repeated or called 'name'")
    return node.func.id, fields


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or the dtype that a bare name stands for."""
    if isinstance(node, ast.Name | ast.Attribute):
        return as_dtype("a name", ast.unparse(node))
    return ast.literal_eval(node)


def _build(name: Any, fields: dict[str, Any]) -> Compressor:
    if not isinstance(name, str) or name not in COMPRESSORS:
        raise ValueError(f"compressor: unknown name {shown(name)}; known are {', '.join(sorted(COMPRESSORS))}")
    cls = COMPRESSORS[name]
    known = {field.name: field for field in dataclasses.fields(cls)}
    for key in fields:
        if key not in known:
            raise ValueError(f"compressor {name}: unknown field {shown(key)}; known are {', '.join(known) or 'none'}")
    for key, value in fields.items():
        if known[key].type in _DTYPE_TYPES:  # a dtype is written as its name, "bfloat16"
            fields = fields | {key: as_dtype(f"compressor {name}: {key}", value)}
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"compressor {name}: {error}") from error


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
