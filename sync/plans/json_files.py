"""Files of JSON: written whole or not at all, and read with errors that name the file, the entry, what was given and
what is allowed. Every value is asked for with its type."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gckernels.compressor import MAX_JSON_DEPTH, too_deep
from gckernels.toolkit.fields import is_printable_unicode, shown

MAX_NBYTES = 256 * 2**20
"""The largest file that is read. A trace of 100 000 tensors with twenty errors each has a quarter of that."""
MAX_INT = 2**53  # larger integers lose digits in other programs that read JSON
MAX_NAME = 1000
"""The largest number of characters in a name."""
MAX_NUMBER = 1e300
"""The largest number."""

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class Entry:
    """A value in a JSON document, with the place where it stands."""

    value: Any
    file: str  # the document, for errors
    error: type[ValueError]  # the class of errors
    remedy: str  # the end of every message: what to do
    path: str = ""  # the entry in the document, such as tensors[3].numel; "" for the whole document
    optional: Collection[str] | None = None
    """The keys that records may leave out; ``None`` for those of fields with defaults."""

    def refuse(self, allowed: str, given: str | None = None) -> NoReturn:
        """Raise an error that says what is allowed here.

        Args:
            allowed: what is allowed.
            given: what was given, if it is not the value.
        """
        got = shown(self.value) if given is None else given
        raise self.error(f"{self._where} must be {allowed}, got {got}; {self.remedy}")

    def built(self, build: Callable[[], T]) -> T:
        """The object that ``build`` makes of the entry. A ValueError that it raises gets the place of the entry."""
        try:
            return build()
        except ValueError as error:
            raise self.error(f"{self._where}: {error}; {self.remedy}") from error

    @property
    def _where(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def fields(self, required: Collection[str], optional: Collection[str] | None = ()) -> dict[str, Entry]:
        """The entries of an object, by key.

        Args:
            required: the keys that it must have.
            optional: the keys that it may have beside them; ``None`` for any.
        """
        if not isinstance(self.value, dict):
            self.refuse(f"an object with {', '.join(required)}")
        missing = [key for key in required if key not in self.value]
        if missing:
            self.refuse(f"an object with {', '.join(required)}", f"none with {', '.join(missing)}")
        if optional is not None and (unknown := self.value.keys() - {*required, *optional}):
            known = ", ".join([*required, *optional])
            self.refuse(f"an object with no other keys than {known}", f"one with {shown(min(unknown))}")
        return {key: self._inside(value, f"{self.path}.{key}".lstrip(".")) for key, value in self.value.items()}

    def mapping(self) -> dict[str, Entry]:
        """The entries of an object whose keys are names."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        found = {key: self._inside(value, f"{self.path}[{shown(key)}]") for key, value in self.value.items()}
        for key, entry in found.items():
            self._inside(key, f"{entry.path}, as a name,").name()
        return found

    def items(self) -> list[Entry]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [self._inside(value, f"{self.path}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """The value, a text."""
        if not isinstance(self.value, str) or not is_printable_unicode(self.value):
            self.refuse("a text")
        return self.value

    def name(self) -> str:
        """The value, a text that is neither empty nor too long."""
        if not 0 < len(self.text()) <= MAX_NAME:
            self.refuse(f"a text of 1 to {MAX_NAME} characters")
        return self.text()

    def choice(self, allowed: Collection[str]) -> str:
        """The value, one of the texts that are allowed."""
        if not isinstance(self.value, str) or self.value not in allowed:
            self.refuse(f"one of {', '.join(allowed)}")
        return self.value

    def member(self, enum: type[E]) -> E:
        """The member of ``enum`` that has the value."""
        return enum(self.choice([str(member.value) for member in enum]))

    def boolean(self) -> bool:
        """The value, which is true or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def integer(self, least: int = 0, most: int = MAX_INT) -> int:
        """The value, an integer from ``least`` to ``most``."""
        if type(self.value) is not int or not least <= self.value <= most:
            upper = "2**53" if most == MAX_INT else most
            self.refuse(f"the integer {most}" if least == most else f"an integer from {least} to {upper}")
        return self.value

    def number(self, above: float | None = None, most: float = MAX_NUMBER) -> float:
        """The value, a finite number of at most ``most``.

        Args:
            above: the number must be more than that; by default it must be at least 0.
            most: as said.
        """
        is_number = type(self.value) in (int, float)
        if not is_number or not (self.value >= 0 if above is None else self.value > above) or not self.value <= most:
            lower = "from 0 up" if above is None else f"above {above:g}"
            self.refuse(f"a finite number {lower}" + ("" if most == MAX_NUMBER else f" and at most {most:g}"))
        return float(self.value)

    def _inside(self, value: Any, path: str) -> Entry:
        return replace(self, value=value, path=path)


def parsed(text: str | bytes, file: str, kind: str, error: type[ValueError], remedy: str) -> Entry:
    """The document in a JSON text.

    Args:
        text: the text; bytes are UTF-8.
        file: its name, for errors.
        kind: the noun for what it describes, such as ``"trace"``.
        error: the class of errors.
        remedy: the end of every message: what to do.

    Raises:
        ValueError: it has more than :data:`MAX_NBYTES`, is no JSON, has a key twice, or is nested too deeply. The error
            is of the class ``error``.
    """
    if len(text) > MAX_NBYTES:
        raise error(f"{file}: more than {MAX_NBYTES >> 20} MiB, no {kind} is as large; {remedy}")
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as problem:
        raise error(f"{file}: no JSON, or cut off, at line {problem.lineno}: {problem.msg}; {remedy}") from problem
    except (ValueError, RecursionError) as problem:  # bytes that are no UTF-8, huge integers, the two hooks
        raise error(f"{file}: no JSON that can be read: {shown(str(problem), quoted=False)}; {remedy}") from problem
    return document(value, file, error, remedy)


def document(value: Any, file: str, error: type[ValueError], remedy: str) -> Entry:
    """The entry of a whole document. The arguments are those of :func:`parsed`.

    Raises:
        ValueError: it is nested too deeply. The error is of the class ``error``.
    """
    if too_deep(value):
        raise error(f"{file}: more than {MAX_JSON_DEPTH} levels of nested lists and objects; {remedy}")
    return Entry(value, file, error, remedy)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} occurs twice in an object")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that it never exists in part: it has the old content until it has all of the new one. An existing
    file keeps its permissions.

    Raises:
        OSError: the folder is missing or full, or cannot be written to. An existing file is as it was.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(beside, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def bytes_of(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, at most one more than :data:`MAX_NBYTES`.

    Raises:
        OSError, ValueError: the file cannot be read, or no file can have this name.
    """
    with open(path, "rb") as file:
        return file.read(MAX_NBYTES + 1)
