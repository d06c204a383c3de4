"""Exit codes of the command, and the error that ends it."""

from __future__ import annotations

from enum import IntEnum

SHOWN_LINES = 5


class Exit(IntEnum):
    """The exit codes of all verbs, for scripts."""

    OK = 0  # done; for advice: compressing gains
    DOES_NOT_PAY = 1  # done, and the advice is not to compress; for the lab: a rank has failed
    WRONG_USE = 2  # an argument is wrong, or a file cannot be opened
    BAD_DATA = 3  # a file is damaged or does not fit, or a measurement is not good enough
    BUG = 4  # an error that nobody has foreseen


class CommandError(Exception):
    """The end of a command, before it has written anything.

    Args:
        code: the exit code.
        message: one sentence that names the file or the argument, and says what is wrong with it.
        remedy: the command to run next, or what else to do; ``""`` if the message says that.
    """

    def __init__(self, code: Exit, message: object, remedy: str = "") -> None:
        text = one_line(message)
        super().__init__(f"{text.rstrip('.')}; {remedy}" if remedy else text)
        self.code = code


def one_line(message: object) -> str:
    """A message of several lines as one line; lines that would be too many to read are only counted."""
    lines = [" ".join(line.split()) for line in str(message).splitlines()]
    lines = [line for line in lines if line]
    if len(lines) > SHOWN_LINES:
        lines[SHOWN_LINES:] = [f"and {len(lines) - SHOWN_LINES} more"]
    head, *details = lines or [""]
    return " ".join([head, ", ".join(details)]).strip()


def wrong_use(message: object, remedy: str = "") -> CommandError:
    """An error for arguments that are wrong, or a file that cannot be opened."""
    return CommandError(Exit.WRONG_USE, message, remedy)


def bad_data(message: object, remedy: str = "") -> CommandError:
    """An error for data that is not good enough: a damaged file, one of something else, a fit with a large error."""
    return CommandError(Exit.BAD_DATA, message, remedy)
