"""Files of machines: descriptions and profiles as versioned JSON, and the descriptions that come with the package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from gckernels.method import MAX_JSON_DEPTH, too_deep

from ..machine import Machine, MachineError
from .entries import shown
from .schema import DESCRIPTION_FORMAT, description_from_json

PROFILE_FORMAT = "gckernels profile"
"""The ``"format"`` of files with measured profiles."""
VERSION = 1
"""The ``"version"`` of both formats."""

_SUFFIX = ".json"
_WRITE_ANEW = "write the file anew: 'gckernels profile -o FILE' measures a machine"


def load_machine(path_or_name: str | os.PathLike[str]) -> Machine:
    """The machine in a file, or the shipped description with a name.

    Args:
        path_or_name: a name of :func:`machine_names`, or else the path of a file. A file with such a name is read as
            ``"./NAME"``.

    Raises:
        MachineError: there is neither a file nor a shipped machine, or the file is not valid. The message names the
            file and the entry, and says what is allowed.
    """
    given = os.fspath(path_or_name)
    if given in machine_names():
        return machine_from_text(_shipped().joinpath(given + _SUFFIX).read_text(encoding="utf-8"), given)
    try:
        text = Path(given).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        known = ", ".join(machine_names())
        raise MachineError(
            f"{shown(given)}: there is no such file, and no shipped machine with this name; shipped are {known}"
        ) from error
    except UnicodeDecodeError as error:
        raise MachineError(f"{given}: is not a text in UTF-8, so it is no machine; {_WRITE_ANEW}") from error
    except (OSError, ValueError) as error:  # a ValueError for a path with a null character
        raise MachineError(f"{shown(given)}: cannot be read: {error}") from error
    return machine_from_text(text, given)


def machine_names() -> tuple[str, ...]:
    """The names of the shipped descriptions, in alphabetical order."""
    names = (file.name for file in _shipped().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def _shipped() -> Traversable:
    """The folder of the shipped descriptions."""
    return resources.files("gckernels.sync.planner").joinpath("shipped", "machines")


def machine_from_text(text: str, file: str) -> Machine:
    """The machine in the text of a file.

    Args:
        text: the content of the file.
        file: the name of the file, for errors.

    Raises:
        MachineError: the text is not valid.
    """
    try:
        return _machine_from_json(_parsed(text))
    except MachineError as error:
        raise MachineError(f"{file}: {error}") from error


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object in a text. NaN, infinities and repeated keys are refused, because JSON does not have them."""
    try:
        record = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except MachineError:
        raise
    except (ValueError, RecursionError) as error:
        raise MachineError(f"is damaged or truncated: {error}; {_WRITE_ANEW}") from error
    if too_deep(record):
        raise MachineError(f"has more than {MAX_JSON_DEPTH} levels of nested lists and objects; {_WRITE_ANEW}")
    if not isinstance(record, dict):
        raise MachineError(f"expected an object, got {shown(record)}; {_WRITE_ANEW}")
    return record


def _refuse_constant(constant: str) -> None:
    raise MachineError(f"contains {constant}, which is no number; replace it")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MachineError(f"has the key {shown(twice)} twice in one object; remove one")
    return record


def _machine_from_json(record: dict[str, Any]) -> Machine:
    readers: dict[str, Callable[[dict[str, Any]], Machine]] = {
        DESCRIPTION_FORMAT: description_from_json,
        PROFILE_FORMAT: _profile,
    }
    given, version = record.get("format"), record.get("version")
    if not isinstance(given, str) or given not in readers:
        allowed = " or ".join(map(repr, readers))
        raise MachineError(f"format: expected {allowed}, got {shown(given)}; is this the file of a machine?")
    if type(version) is not int or version != VERSION:
        raise MachineError(
            f"version: expected {VERSION}, got {shown(version)}; write the file with this release of gckernels"
        )
    return readers[given](record)


def _profile(record: dict[str, Any]) -> Machine:
    from .profile import Profile  # only if there is one to be read

    return Profile.from_json(record)
