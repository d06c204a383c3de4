"""The file of kept profiles of some ranks: one for each budget and each set of compressors, as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..planner.machines.machine import MachineError, has_prices
from ..planner.machines.profile import Profile
from ..programs.steps import AllGather, AllReduce, Level, Place

_MOST = 8  # profiles in a file; the oldest ones go


def find(text: str, seconds: float, compressors: Collection[str]) -> list[str]:
    """The kept profiles that would do, as JSON, those first that were given most time.

    Args:
        text: the file.
        seconds: they were given at least this budget.
        compressors: the specs of compressors, all of which they measured.
    """
    fitting = [
        each for each in _entries(text) if each["seconds"] >= seconds and set(compressors) <= set(each["compressors"])
    ]
    fitting.sort(key=lambda each: (each["seconds"], -len(each["compressors"])), reverse=True)
    return [json.dumps(each["profile"]) for each in fitting]


def is_complete(profile: Profile, methods: Iterable[Compressor]) -> bool:
    """Whether a profile has a price of everything that plans need.

    It has none of what was left out, and of measurements that disagree because something else was running. A
    compressor for which there was no time does not count: another profile in as many seconds would lack it, too.

    Args:
        profile: the profile.
        methods: the compressors that plans may use. Every plan may use ``Identity``.
    """
    one = np.ones(1)
    try:
        for step in (AllReduce, AllGather):
            profile.collective(step.__name__, Level.FLAT, Place.DEVICE, one)
        profile.copy(profile.computes_on, one)
    except MachineError:
        return False
    measured = {each.compressor for each in profile.codecs}
    return all(has_prices(profile, method) for method in {Identity(), *measured.intersection(methods)})


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
            and all(isinstance(spec, str) for spec in each["compressors"])
            and isinstance(each["profile"], dict)
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
