"""Numbers with their units, as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping

_ROUNDS_UP = 0.9995
"""The part of a larger unit from which three digits are those of the whole unit."""
_SAME = 0.005
"""The relative difference below which two times are the same."""


def three_digits(value: float) -> str:
    """A number with three significant digits, such as ``"0.0123"``, ``"1.20"`` or ``"12,300"``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    decimals = 2 - math.floor(math.log10(abs(rounded)))  # 9.996 has become 10.0
    return f"{rounded:,.{max(decimals, 0)}f}"


def duration(seconds: float) -> str:
    """A time, such as ``"12.3 ms"``, or ``"1.23 s"`` from a second up."""
    return _scaled(seconds * 1e3, {1e3: "s"}, "ms")


def volume(nbytes: float) -> str:
    """A size, such as ``"4.19 MB"``, ``"1.23 GB"`` or ``"1.23 TB"``, in powers of 1,000 bytes."""
    return _scaled(nbytes / 1e6, {1e6: "TB", 1e3: "GB"}, "MB")


def rate(bit_per_s: float) -> str:
    """A bandwidth, such as ``"100 Mbit/s"`` or ``"2.50 Gbit/s"``."""
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bit_per_s >= _ROUNDS_UP * unit:
            return f"{_short(bit_per_s / unit)} {name}"
    return f"{_short(bit_per_s)} bit/s"


def percent(part: float) -> str:
    """A fraction, such as ``"12.3 %"``."""
    return f"{three_digits(part * 100)} %"


def whole_percent(part: float) -> str:
    """A fraction without decimals, such as ``"25 %"``."""
    return f"{round(part * 100)} %"


def plural(count: int, noun: str) -> str:
    """A number of things, such as ``"1 unit"`` or ``"3 units"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def change(now_s: float, before_s: float) -> str:
    """The relative difference between two times, such as ``"-62 %"``; ``"the same"`` below half a percent."""
    if before_s <= 0:
        return "from 0"
    part = now_s / before_s - 1.0
    if abs(part) < _SAME:
        return "the same"
    return f"{part:+.0%}".replace("%", " %") if abs(part) >= 0.095 else f"{part:+.1%}".replace("%", " %")


def two_digits(error: float) -> str:
    """A relative error, such as ``"0.13"`` or ``"0.0039"``."""
    return f"{error:.2g}"


def _scaled(value: float, larger: Mapping[float, str], name: str) -> str:
    """A value with the name of its unit or, from its size up in ``larger``, of a larger one."""
    for size, larger_name in larger.items():
        if value >= _ROUNDS_UP * size:
            return f"{three_digits(value / size)} {larger_name}"
    return f"{three_digits(value)} {name}"


def _short(value: float) -> str:
    text = three_digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text
