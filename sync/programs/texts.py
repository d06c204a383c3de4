"""Programs as people write them."""

from __future__ import annotations

import re
from typing import Any

from .steps import KINDS, Decode, Encode, Level, Place, Program, ProgramError, Step

_SHORT = {
    "E": "Encode",
    "D": "Decode",
    "AR": "AllReduce",
    "RS": "ReduceScatter",
    "R": "Reduce",
    "AG": "AllGather",
    "A2A": "AllToAll",
    "G": "Gather",
    "B": "Broadcast",
    "H": "Hop",
}
_WORD = re.compile(r"(\w+)(?:\((\w+)\))?")


def parse(text: str) -> Program:
    """The program of a text, which has the names of steps or short words for them, such as ``"E AG(inter) D(host)"``.

    The short words are ``E`` and ``D`` to encode and decode, ``AR`` all-reduce, ``RS`` reduce-scatter, ``R`` reduce,
    ``AG`` all-gather, ``A2A`` all-to-all, ``G`` gather, ``B`` broadcast and ``H`` for a hop around a ring.

    Raises:
        ProgramError: there is no word, one is no step, or what follows in parentheses is no place or level.
    """
    if not text.split():
        raise ProgramError(f"program {text!r}: there is no step")
    return tuple(_step_of(text, word) for word in text.split())


def _step_of(text: str, word: str) -> Step:
    found = _WORD.fullmatch(word)
    kind = None if found is None else KINDS.get(_SHORT.get(found[1], found[1]))
    if found is None or kind is None:
        steps = ", ".join(f"{short} or {name}" for short, name in _SHORT.items())
        raise ProgramError(f"program {text!r}: {word!r} is no step; known: {steps}")
    options: type[Any] = Place if issubclass(kind, Encode | Decode) else Level
    if found[2] is None:
        return kind()  # type: ignore[no-any-return]
    try:
        return kind(options(found[2]))  # type: ignore[no-any-return]
    except ValueError as error:
        allowed = ", ".join(member.value for member in options)
        raise ProgramError(f"program {text!r}: {word!r} must have one of {allowed} in parentheses") from error
