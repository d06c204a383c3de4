"""Everything that a verb ends with: results and an exit code, or an error of one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

SHOWN_LINES = 5
_COMMAND = re.compile("gckernels (trace|profile|plan)")


class Exit(IntEnum):
    """The exit codes of all verbs, for scripts."""

    OK = 0  # done; for advice: compressing gains
    DOES_NOT_PAY = 1  # done, and compressing does not pay; for the lab: a rank has failed
    WRONG_USE = 2  # an argument is wrong, or a file cannot be opened
    BAD_DATA = 3  # a file is damaged or does not fit, or a measurement is not good enough
    BUG = 4  # an error that nobody has foreseen


@dataclass(frozen=True)
class Part:
    """Facts among the results, the same for people and for scripts."""

    text: str | None = None  # their lines; None if people need none
    record: Any = field(default_factory=dict)  # JSON values: entries of an object, or of any kind if it is alone


BLANK = Part("")
"""An empty line."""


@dataclass(frozen=True)
class Outcome:
    """The results of a verb, which the command writes and prints."""

    parts: Sequence[Part] = ()  # in the order in which people read them
    files: Mapping[str | None, str | bytes] = field(default_factory=dict)  # contents by path; None was not asked for
    notes: Sequence[str] = ()  # lines about the run, for stderr
    code: Exit = Exit.OK

    @property
    def text(self) -> str:
        """The results for people."""
        return "\n".join(part.text for part in self.parts if part.text is not None)

    @property
    def record(self) -> Any:
        """The same as JSON values, for ``--json``."""
        records = [part.record for part in self.parts if part.record]
        return records[0] if len(records) == 1 else {key: value for each in records for key, value in each.items()}


class CommandError(Exception):
    """The end of a command, before it has written anything.

    Args:
        message: one sentence that names the file or the argument, and says what is wrong with it.
        remedy: the command to run next, or what else to do; ``""`` if there is none. It is left out where the message
            names a command already.
    """

    def __init__(self, code: Exit, message: object, remedy: str = "") -> None:
        text = one_line(message)
        super().__init__(f"{text.rstrip('.')}; {remedy}" if remedy and not _COMMAND.search(text) else text)
        self.code = code


def one_line(message: object) -> str:
    """A message of several lines as one line, of which indented ones are details; lines that would be too many to read
    are only counted."""
    lines = [line for line in str(message).splitlines() if line.strip()]
    if len(lines) > SHOWN_LINES:
        lines[SHOWN_LINES:] = [f"  and {len(lines) - SHOWN_LINES} more"]
    text = " ".join(" ".join(line.split()) for line in lines if not line[0].isspace())
    details = ", ".join(" ".join(line.split()) for line in lines if line[0].isspace())
    if not details:
        return text
    return f"{text} {details}" if text.endswith(":") else f"{text} ({details})"


def wrong_use(message: object, remedy: str = "") -> CommandError:
    """An error for arguments that are wrong, or a file that cannot be opened."""
    return CommandError(Exit.WRONG_USE, message, remedy)


def bad_data(message: object, remedy: str = "") -> CommandError:
    """An error for data that is not good enough: a damaged file, one of something else, a fit with a large error."""
    return CommandError(Exit.BAD_DATA, message, remedy)
