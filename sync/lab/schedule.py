"""Faults of links at given times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .link import checked_rate

ACTIONS = ("cut", "restore", "throttle")
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Event:
    """A change of a link at a given time, written like ``"5s cut 1"`` or ``"1500ms throttle machine0 10mbit"``.

    Attributes:
        at_s: seconds since the start of the ranks.
        action: ``"cut"``, ``"restore"`` or ``"throttle"``.
        place: the link, as in :class:`Links`.
        rate: the new rate, for ``"throttle"`` alone.

    Raises:
        ValueError: a value is not valid.
    """

    at_s: float
    action: str
    place: int | str
    rate: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"an event must be at 0 s or later, got {self.at_s!r}")
        if self.action not in ACTIONS:
            raise ValueError(f"the action of an event must be one of {', '.join(ACTIONS)}; got {self.action!r}")
        if (self.rate is not None) != (self.action == "throttle"):
            raise ValueError(f"an event has a rate if its action is throttle; got {self.action!r}, {self.rate!r}")
        if self.rate is not None:
            checked_rate(self.rate)

    @classmethod
    def from_text(cls, text: str) -> Event:
        """The event that a text describes.

        Raises:
            ValueError: the text describes none.
        """
        words = text.split()
        if len(words) < 3 or words[1] not in ACTIONS or len(words) != (4 if words[1] == "throttle" else 3):
            allowed = '"5s cut 1", "10s restore 1" or "20s throttle machine0 10mbit"'
            raise ValueError(f"an event must be written like {allowed}; got {text!r}")
        return cls(seconds(words[0]), words[1], place_from_text(words[2]), *words[3:])

    def __str__(self) -> str:
        return f"{self.at_s:g}s {self.action} {self.place}{'' if self.rate is None else f' {self.rate}'}"


def seconds(text: str) -> float:
    """Seconds of a duration such as ``"1ms"`` or ``"2.5s"``.

    Raises:
        ValueError: the text is no duration.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if found is None:
        raise ValueError(f"a duration must be written like 100us, 1ms or 2.5s; got {text!r}")
    return float(found[1]) * UNITS_S[found[2]]


def place_from_text(text: str) -> int | str:
    """A place as :meth:`Links.cut` takes it: a rank's number becomes an int."""
    return int(text) if text.isdecimal() else text
