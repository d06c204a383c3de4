"""Records: dataclasses as objects of JSON. The annotations of a class say how its fields are written and read.

Texts, numbers from 0 up, enumerations, lists, mappings and records inside of records need no more than that; other
fields have a :class:`JsonForm`. The key is the name of the field, unless its metadata have another ``"key"``. Fields
with defaults may be left out of a file, unless its entries say which may. Fields with ``init=False`` are not in it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args, get_origin

from .json_files import Entry

T = TypeVar("T")

FLAT = "flat"
"""Annotates a record whose entries stand among those of the record around it."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class JsonForm:
    """The form of a value in JSON, as a part of an annotation: ``Annotated[float, JsonForm(above_zero)]``."""

    read: Callable[[Entry], Any]  # returns the value of an entry
    write: Callable[[Any], Any] = _same  # returns the JSON value


def read_record(entry: Entry, kind: type[T], head: Collection[str] = ()) -> T:
    """The object that an entry describes. A ValueError of its class gets the place of the entry.

    Args:
        kind: the class of the object.
        head: other keys that the entry must have.
    """
    return entry.built(functools.partial(kind, **read_fields(entry, kind, head)))


def read_fields(entry: Entry, kind: Any, head: Collection[str] = (), more: Collection[str] = ()) -> dict[str, Any]:
    """The values of a record's fields by name, without those that are left out.

    Args:
        kind: the class of the record.
        head: other keys that the entry must have.
        more: other keys that it may have.
    """
    fields = list(_flattened(kind))
    optional = [each.key for each in fields if _may_miss(each, entry)]
    required = [each.key for each in fields if each.key not in optional]
    return _values(entry, kind, entry.fields([*head, *required], [*optional, *more]))


def _may_miss(field: _Field, entry: Entry) -> bool:
    return field.has_default if entry.optional is None else field.key in entry.optional


def checked_fields(record: Any, file: str, error: type[ValueError], remedy: str) -> dict[str, Any]:
    """The object of JSON for a record whose fields have values that can be read again.

    Args:
        file: the name of the record, for errors.
        error: the class of errors.
        remedy: the end of every message: what to do.

    Raises:
        ValueError: a value is not allowed. The error is of the class ``error``.
    """
    try:
        found = written(record)
    except (AttributeError, TypeError, ValueError, OverflowError) as problem:
        raise error(f"{file}: some values have wrong types: {problem}; {remedy}") from problem
    read_fields(Entry(found, file, error, remedy), type(record))
    return found


def from_value(build: Callable[[Any], Any]) -> Callable[[Entry], Any]:
    """A function that reads an entry by ``build``, which is given the JSON value. Its ValueErrors get the place."""
    return lambda entry: entry.built(functools.partial(build, entry.value))


def _values(entry: Entry, kind: Any, given: Mapping[str, Entry]) -> dict[str, Any]:
    found = {}
    for field in _fields_of(kind):
        if field.flat is not None:
            found[field.name] = entry.built(functools.partial(field.flat, **_values(entry, field.flat, given)))
        elif field.key in given:
            found[field.name] = field.form.read(given[field.key])
    return found


def written(record: Any) -> dict[str, Any]:
    """The object of JSON for a record."""
    return _written(type(record), record)


def _written(kind: Any, record: Any) -> dict[str, Any]:
    found = {field.key: field.form.write(getattr(record, field.name)) for field in _fields_of(kind)}
    for key in [field.key for field in _fields_of(kind) if field.flat is not None]:
        found |= found.pop(key)
    return found


@dataclass(frozen=True)
class _Field:
    """A field of a record."""

    name: str
    key: str  # its key in files
    form: JsonForm
    has_default: bool  # whether it may be left out
    flat: Any  # the class of its value if the entries of that stand among those around it, else None


@functools.cache
def _fields_of(kind: Any) -> tuple[_Field, ...]:
    known, found = typing.get_type_hints(kind, include_extras=True), []
    for field in dataclasses.fields(kind):
        annotation, flat = known[field.name], None
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if get_origin(annotation) is Annotated and FLAT in annotation.__metadata__:
            annotation = flat = get_args(annotation)[0]
        if field.init:
            key = field.metadata.get("key", field.name)
            found.append(_Field(field.name, key, _form_of(annotation), has_default, flat))
    return tuple(found)


def _flattened(kind: Any) -> Iterator[_Field]:
    """The fields of a record, and those of its flat ones behind them."""
    fields = _fields_of(kind)
    yield from (field for field in fields if field.flat is None)
    for field in fields:
        if field.flat is not None:
            yield from _flattened(field.flat)


_PLAIN = {
    str: JsonForm(Entry.text),
    bool: JsonForm(Entry.boolean),
    int: JsonForm(Entry.integer),
    float: JsonForm(Entry.number),
}


def _form_of(kind: Any) -> JsonForm:
    """The form of the values of a type."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        form: JsonForm = kind.__metadata__[0]
        return form
    if origin in (typing.Union, types.UnionType):  # with None
        one = _form_of(inside[0])
        return JsonForm(
            lambda entry: None if entry.value is None else one.read(entry),
            lambda value: None if value is None else one.write(value),
        )
    if origin is tuple:
        one = _form_of(inside[0])
        return JsonForm(
            lambda entry: tuple(map(one.read, entry.items())),
            lambda values: list(map(one.write, values)),
        )
    if origin is Mapping:
        return _form_of_mapping(inside[0], _form_of(inside[1]))
    if hasattr(kind, "__dataclass_fields__"):
        return JsonForm(functools.partial(read_record, kind=kind), functools.partial(_written, kind))
    if issubclass(kind, Enum):
        return JsonForm(functools.partial(Entry.member, enum=kind), lambda member: member.value)
    return _PLAIN[kind]


def _form_of_mapping(key: Any, one: JsonForm) -> JsonForm:
    """The form of mappings from names, or members of an enumeration, to values of the form ``one``."""
    if key is str:
        return JsonForm(
            lambda entry: {name: one.read(each) for name, each in entry.mapping().items()},
            lambda values: {name: one.write(each) for name, each in values.items()},
        )
    allowed = [member.value for member in key]
    return JsonForm(
        lambda entry: {key(name): one.read(each) for name, each in entry.fields((), allowed).items()},
        lambda values: {member.value: one.write(each) for member, each in values.items()},
    )
