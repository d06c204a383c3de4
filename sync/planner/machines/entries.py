"""Objects in JSON files, read entry by entry: every value is checked, and every error names its entry."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from ..machine import MachineError

MAX_NUMBER = 1e18
"""The largest number in a file. It is beyond every rate, time and size, and products of several stay finite."""


class Entries:
    """The entries of a JSON object.

    Args:
        record: the object.
        path: the dotted path of the object in the file; ``""`` for the whole file.

    Raises:
        MachineError: ``record`` is not an object.
    """

    def __init__(self, record: Any, path: str = "") -> None:
        if not isinstance(record, dict):
            raise MachineError(f"{path or 'the file'}: expected an object, got {shown(record)}")
        self._record: dict[str, Any] = record
        self.path = path
        self._read: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __contains__(self, key: str) -> bool:
        return key in self._record

    def at(self, key: str) -> str:
        """The dotted path of an entry."""
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str) -> Any:
        """The value of an entry, not checked.

        Raises:
            MachineError: there is no such entry.
        """
        if key not in self._record:
            raise MachineError(f"{self.at(key)}: is missing")
        self._read.add(key)
        return self._record[key]

    def text(self, key: str, default: str | None = None) -> str:
        """The text of an entry; ``default``, if one is given, where there is no such entry."""
        if default is not None and key not in self:
            return default
        value = self.value(key)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise MachineError(f"{self.at(key)}: expected a text, got {shown(value)}")
        return value

    def choice(self, key: str, allowed: Collection[str]) -> str:
        """The text of an entry that must be one of ``allowed``."""
        value = self.value(key)
        if not isinstance(value, str) or value not in allowed:
            raise MachineError(f"{self.at(key)}: expected one of {', '.join(allowed)}, got {shown(value)}")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float | None = None, most: float = MAX_NUMBER
    ) -> float:
        """The number of an entry.

        Args:
            key: the entry.
            default: the number where there is no such entry; ``None`` if there must be one.
            above: the number must be more than that; by default it must be at least 0.
            most: the number must be at most that.
        """
        if default is not None and key not in self:
            return default
        return as_number(self.value(key), self.at(key), above=above, most=most)

    def integer(self, key: str, least: int = 1, most: int = 1 << 20) -> int:
        """The whole number of an entry, from ``least`` to ``most``."""
        value = self.value(key)
        if type(value) is not int or not least <= value <= most:
            raise MachineError(f"{self.at(key)}: expected an integer from {least} to {most}, got {shown(value)}")
        return value

    def entries(self, key: str, optional: bool = False) -> Entries:
        """The object of an entry.

        Args:
            key: the entry.
            optional: whether the entry may be missing, which means an empty object.
        """
        return Entries({} if optional and key not in self else self.value(key), self.at(key))

    def finish(self, known: Collection[str] = ()) -> None:
        """Raise :class:`~..machine.MachineError` if the object has an entry that nobody has asked for.

        Args:
            known: entries that it may have, besides those that have been read.
        """
        for key in self._record:
            if key not in self._read:
                allowed = ", ".join(sorted({*self._read, *known})) or "none"
                raise MachineError(f"{self.at(shortened(key))}: is unknown; known are {allowed}")


def as_number(value: Any, path: str, *, above: float | None = None, most: float = MAX_NUMBER) -> float:
    """``value`` as a float.

    Args:
        value: a value of a JSON file.
        path: its dotted path, for errors.
        above: as for :meth:`Entries.number`.
        most: likewise.

    Raises:
        MachineError: ``value`` is not a number, not finite, or out of bounds.
    """
    is_number = type(value) in (int, float) and math.isfinite(value if type(value) is float else 0.0)
    too_low = is_number and (value < 0 if above is None else value <= above)
    if not is_number or too_low or value > most:
        lower = "at least 0" if above is None else f"above {above:g}"
        raise MachineError(f"{path}: expected a number {lower} and at most {most:g}, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """A short text for a value, for errors."""
    match value:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case int() if type(value) is int and abs(value) > MAX_NUMBER:
            return "an integer that is too large"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """At most 60 characters of a text."""
    return text if len(text) <= 60 else text[:57] + "..."
