"""The file of kept profiles of some ranks: one for each budget and each set of compressors, as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

_MOST = 8  # profiles in a file; the oldest ones go


def find(text: str, seconds: float, compressors: Collection[str]) -> str:
    """The kept profile that was given most time, as JSON; an empty text if there is none.

    Args:
        text: the file.
        seconds: it was given at least this budget.
        compressors: the specs of compressors, all of which it measured.
    """
    fitting = [
        each for each in _entries(text) if each["seconds"] >= seconds and set(compressors) <= set(each["compressors"])
    ]
    if not fitting:
        return ""
    return json.dumps(max(fitting, key=lambda each: (each["seconds"], -len(each["compressors"])))["profile"])


def with_profile(text: str, seconds: float, compressors: Collection[str], profile: object) -> str:
    """The file with another profile, which replaces one of the same budget and compressors.

    Args:
        text: the file; it may be empty or damaged.
        seconds: the budget.
        compressors: the specs of the compressors that were to be measured.
        profile: the profile as JSON objects.
    """
    new = {"seconds": seconds, "compressors": sorted(compressors), "profile": profile}
    others = [
        each
        for each in _entries(text)
        if (each["seconds"], sorted(each["compressors"])) != (new["seconds"], new["compressors"])
    ]
    return json.dumps({"profiles": [new, *others][:_MOST]}, indent=1)


def _entries(text: str) -> list[dict[str, Any]]:
    """The entries of a file; nothing of a damaged one."""
    try:
        entries = json.loads(text)["profiles"]
        return [
            each
            for each in entries
            if isinstance(each["seconds"], int | float)
            and isinstance(each["compressors"], list)
            and isinstance(each["profile"], dict)
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
