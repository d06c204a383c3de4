"""Reading of JSON objects whose fields are known: everything is checked, and errors say where it is."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any, TypeVar

from gckernels.method import Method, from_spec

from .curves import ProfileError

E = TypeVar("E", bound=Enum)


class Record:
    """A JSON object with exactly the given fields.

    Args:
        where: the place of the object in its file, for errors.
        given: the object.
        fields: names of its fields.

    Raises:
        ProfileError: ``given`` is no object, lacks a field, or has another one.
    """

    def __init__(self, where: str, given: object, fields: Collection[str]) -> None:
        if not isinstance(given, dict):
            raise ProfileError(f"{where} must be an object, got {_short(given)}")
        for key in fields:
            if key not in given:
                raise ProfileError(f"{where} lacks {key!r}")
        for key in given:
            if key not in fields:
                raise ProfileError(f"{where} has an unknown field {_short(key)}; known are {', '.join(fields)}")
        self._where, self._given = where, given

    def text(self, key: str) -> str:
        """The text of a field."""
        value = self._given[key]
        return value if isinstance(value, str) else self._refuse(key, "text")

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of texts of a field."""
        value = self._given[key]
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._refuse(key, "a list of texts")
        return tuple(value)

    def number(self, key: str) -> float:
        """The number of a field, from 0 up."""
        value = self._given[key]
        return float(value) if _is_number(value) else self._refuse(key, "a number from 0 up")

    def number_or_none(self, key: str) -> float | None:
        """The number of a field, from 0 up, or ``None`` for null."""
        return None if self._given[key] is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of numbers of a field, from 0 up."""
        value = self._given[key]
        if not isinstance(value, list) or not all(map(_is_number, value)):
            self._refuse(key, "a list of numbers from 0 up")
        return tuple(map(float, value))

    def integer(self, key: str) -> int:
        """The integer of a field, from 0 up, of at most 63 bits."""
        value = self._given[key]
        return value if type(value) is int and 0 <= value < 1 << 63 else self._refuse(key, "an integer from 0 up")

    def member(self, key: str, enum: type[E]) -> E:
        """The member of ``enum`` whose value a field has."""
        return member(f"{self._where}: {key}", self._given[key], enum)

    def method(self, key: str) -> Method:
        """The compressor whose spec a field has."""
        try:
            return from_spec(self.text(key))
        except ValueError as error:
            raise ProfileError(f"{self._where}: {key} is no compressor of this release: {error}") from error

    def record(self, key: str, fields: Collection[str]) -> Record:
        """The object in a field."""
        return Record(f"{self._where}: {key}", self._given[key], fields)

    def records(self, key: str, fields: Collection[str]) -> Iterator[Record]:
        """The list of objects in a field."""
        value = self._given[key]
        if not isinstance(value, list):
            self._refuse(key, "a list")
        for index, each in enumerate(value):
            yield Record(f"{self._where}: {key} {index}", each, fields)

    def named_numbers(self, key: str) -> dict[str, float]:
        """The object in a field, whose values are numbers from 0 up."""
        value = self._given[key]
        if not isinstance(value, dict) or not all(map(_is_number, value.values())):
            self._refuse(key, "an object of numbers from 0 up")
        return {str(name): float(number) for name, number in value.items()}

    def _refuse(self, key: str, allowed: str) -> Any:
        raise ProfileError(f"{self._where}: {key} must be {allowed}, got {_short(self._given[key])}")


def member(where: str, value: object, enum: type[E]) -> E:
    """The member of ``enum`` with a value.

    Raises:
        ProfileError: there is none.
    """
    try:
        return enum(value)
    except ValueError as error:
        allowed = ", ".join(str(each.value) for each in enum)
        raise ProfileError(f"{where} must be one of {allowed}, got {_short(value)}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
