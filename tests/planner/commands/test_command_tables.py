"""Tables stand below each other, and numbers have three significant digits and a unit."""

from __future__ import annotations

import pytest

from gckernels.planner.commands.common import tables
from gckernels.sync.plans import numbers


def test_columns_are_aligned():
    steps = {"a": "1.23 ms", "longer": "12.3 ms"}
    columns = {"name": str, "step": steps.__getitem__, "why": lambda name: "" if name == "a" else "x"}
    text = tables.table(steps, columns, left=(0, 2))
    assert text.splitlines() == ["name       step  why", "a       1.23 ms", "longer  12.3 ms  x"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.012345, "0.0123"),
        (1.2, "1.20"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12345.6, "12,300"),
        (-1.5, "-1.50"),
    ],
)
def test_three_digits(value, text):
    assert numbers.three_digits(value) == text


def test_units():
    assert [numbers.duration(each) for each in (0.0123, 0.9994, 0.9996, 220)] == [
        "12.3 ms",
        "999 ms",
        "1.00 s",
        "220 s",
    ]
    volumes = [numbers.volume(each) for each in (4_194_304, 999.4e6, 999.6e6, 2.76e11, 1e12)]
    assert volumes == ["4.19 MB", "999 MB", "1.00 GB", "276 GB", "1.00 TB"]
    assert [numbers.rate(each) for each in (1e8, 2.5e9, 999.9e6, 64e3)] == [
        *("100 Mbit/s", "2.5 Gbit/s", "1 Gbit/s", "64 kbit/s")
    ]
    assert numbers.percent(0.0521) == "5.21 %"
    assert [numbers.plural(count, "unit") for count in (1, 2000)] == ["1 unit", "2,000 units"]
