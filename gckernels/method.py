"""What every method of compression is: a frozen configuration with a name, and the table of all of them.

A method says what it is (biased, summable, how many rounds it takes) and how many bytes it sends. One-shot codecs,
which turn a vector into a payload and back, are :class:`~gckernels.Compressor`; a method that computes between its
collectives, such as :class:`~gckernels.PowerSGD`, derives from :class:`Method` alone.
"""

from __future__ import annotations

import ast
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .toolkit.fields import as_dtype


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of a method that its users rely on: programs, plans, tests.

    Attributes:
        summable: payloads can be added element by element while they travel (an allreduce works).
        payload_dtype: dtype in which the payloads of a summable method are added.
        needs_feedback: the method is biased, and training needs the residual of error feedback.
        stochastic: payloads depend on a seed.
        unbiased: over all seeds, the mean of what a finite gradient decodes to is that gradient, to the resolution of
            the random numbers.
        conserves: with a residual, the decoded gradient plus the new residual is the gradient plus the old residual;
            for a method of several rounds, whose result all ranks have made together, on the mean over the ranks.
        states: number of vectors in the residual, concatenated, each as long as the gradient. Encoding uses all of
            them.
        applies_momentum: decoded gradients contain a momentum already, which takes the place of the optimizer's.
        averages: several payloads merge to ``scale`` times the sum of their decodings; otherwise to a result that the
            method defines, such as a majority vote.
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
class Method(ABC):
    """Base of all methods. Subclasses are frozen dataclasses: their fields are their configuration."""

    @property
    def traits(self) -> Traits:
        """The promises of the method. A subclass states them as ``traits = Traits(needs_feedback=True)`` or, where they
        depend on its fields, as a property."""
        return _NO_TRAITS

    @property
    def name(self) -> str:
        """Key in the table of methods."""
        return type(self).__name__

    @property
    def rounds(self) -> int:
        """Number of encode-communicate rounds per synchronisation."""
        return 1

    @abstractmethod
    def round_nbytes(self, numel: int, index: int) -> int:
        """Bytes that a rank contributes in round ``index``, from 0 on, for a unit of ``numel`` elements: a multiple
        of 16 or, as a mean over steps that differ, of 8.

        Raises:
            ValueError: a unit of this size cannot be encoded with this configuration.
        """

    def fit(self, shape: Sequence[int]) -> Method:
        """The method for a parameter of this shape (dimensions in the order of its memory); by default the same for
        all."""
        return self

    @property
    def of_shard(self) -> Method:
        """What the owner of a shard encodes the merged shard with, by default the same.

        Its payloads have the same size and format and merge in the same way: either of the two decodes them.
        """
        return self

    @property
    def schedule(self) -> tuple[tuple[int, Method], ...]:
        """The methods that encode the gradients during a training, as pairs ``(first step, method)`` in order.

        The first pair begins at step 0. All methods have the same states. The default is this method all the time.
        """
        return ((0, self),)

    def at_step(self, step: int) -> Method:
        """The method of a training step, counted from the first compressed step, which is 0."""
        return [method for first, method in self.schedule if first <= step][-1]

    def factor_sizes(self, numel: int) -> dict[str, int]:
        """Elements of what the method remembers of a unit besides the residual, by kind."""
        return {}

    def compile_host(self, recodes: bool = False) -> None:  # noqa: B027, many have nothing to compile
        """Compile, or load, what the CPU path of this method runs, so that no later call waits for a compiler; by
        default there is nothing to compile.

        Args:
            recodes: what ``Compressor.recode`` runs, too.
        """

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, e.g. ``{"name": "BlockQuant", "bits": 4, "block": 256}``; see :func:`from_json`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"name": self.name} | {key: _plain(value) for key, value in values.items()}


METHODS: dict[str, type[Method]] = {}
"""Every method by name: what plans and command lines are read with."""

DEEPEST_JSON = 32
"""Levels of lists and objects in what is read as JSON. More are no plan and no configuration, and Python can neither
show nor compare them."""

_DTYPE_TYPES = (torch.dtype, "torch.dtype")  # as a class, and as text where annotations are postponed (PEP 563)


def from_json(record: dict[str, Any]) -> Method:
    """The method that :meth:`Method.to_json` wrote.

    Raises:
        ValueError: unknown name or field, or a value that the method refuses.
    """
    if too_deep(record):
        raise ValueError(f"compressor: more than {DEEPEST_JSON} levels of lists and objects in each other")
    if not isinstance(record, dict) or "name" not in record:
        raise ValueError(f"compressor: expected an object with a 'name', got {record!r}")
    fields = {key: value for key, value in record.items() if key != "name"}
    return _build(record["name"], fields)


def too_deep(record: Any) -> bool:
    """Whether ``record`` has more than :data:`DEEPEST_JSON` levels of lists and objects in each other."""
    level = [record]
    for _ in range(DEEPEST_JSON):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        found = {id(value): value for values in inside if isinstance(values, Iterable) for value in values}
        level = [value for value in found.values() if isinstance(value, dict | list | tuple)]
    return bool(level)


def from_spec(spec: str) -> Method:
    """The method that a command line names: ``"EFSignSGD"`` or ``"BlockQuant(bits=4, block=256)"``.

    Only keyword arguments with literal values are understood; nothing is evaluated. A dtype goes by its name,
    ``"Cast16(dtype='float16')"``, ``"Cast16(dtype=fp16)"`` or ``"Cast16(dtype=torch.float16)"``.

    >>> gckernels.from_spec("TopK(ratio=0.05)")
    TopK(ratio=0.05, value_bits=32)

    Raises:
        TypeError: not text.
        ValueError: not of that form, unknown name or field, or a value that the method refuses.
    """
    if not isinstance(spec, str):
        raise TypeError(f"compressor: a spec must be a string such as 'BlockQuant(bits=4)', got {type(spec).__name__}")
    try:
        name, fields = _read_spec(spec)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        shown = repr(spec if len(spec) <= 200 else spec[:200] + "...")
        raise ValueError(f"compressor: expected Name or Name(field=value, ...), got {shown}") from error
    return from_json({"name": name} | fields)


def _read_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the fields; some error if it is not of the form."""
    node = ast.parse(spec.strip(), mode="eval").body
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("neither a name nor a call")
    fields = {str(word.arg): _literal(word.value) for word in node.keywords}
    if len(fields) != len(node.keywords) or "name" in fields:
        raise ValueError("a field twice, or one that no method has")
    return node.func.id, fields


def _literal(node: ast.expr) -> Any:
    """The value that is written down; of a name that is no text, the dtype."""
    if isinstance(node, ast.Name | ast.Attribute):
        return as_dtype("a name", ast.unparse(node))
    return ast.literal_eval(node)


def _build(name: Any, fields: dict[str, Any]) -> Method:
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"compressor: unknown name {name!r}; known are {', '.join(sorted(METHODS))}")
    cls = METHODS[name]
    known = {field.name: field for field in dataclasses.fields(cls)}
    for key in fields:
        if key not in known:
            raise ValueError(f"compressor {name}: unknown field {key!r}; known are {', '.join(known) or 'none'}")
    for key, value in fields.items():
        if known[key].type in _DTYPE_TYPES:  # a dtype travels under its name, "bfloat16"
            fields = fields | {key: as_dtype(f"compressor {name}: {key}", value)}
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"compressor {name}: {error}") from error


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
