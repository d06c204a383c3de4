"""Records are read as they were written. Whatever else a file holds is a record, or refused with the file's error."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gckernels.sync.plans.json_files import MAX_INT, Entry
from gckernels.sync.plans.json_records import FLAT, JsonForm, read_record, written

TEXTS = st.text(st.characters(categories=("L", "N", "P", "Zs")), max_size=8)
NAMES = TEXTS.filter(bool)
COUNTS, NUMBERS = st.integers(0, MAX_INT), st.floats(0, 1e300)


class Color(Enum):
    RED, BLUE = "red", "blue"


@dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0


@dataclass(frozen=True)
class Limits:
    low: int
    high: int = 7

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")


@dataclass(frozen=True)
class Record:
    """A record with fields of all kinds."""

    title: str
    count: int
    ratio: float
    is_new: bool
    color: Color
    points: tuple[Point, ...]
    weights: Mapping[str, float]
    of_colors: Mapping[Color, int]
    limits: Annotated[Limits, FLAT]
    squared: Annotated[int, JsonForm(Entry.integer, str)] = 4
    parent: Point | None = None
    renamed: str = field(default="", metadata={"key": "class"})

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Record) and vars(self) == vars(other)


class RecordError(ValueError):
    """Raised for damaged records."""


POINTS = st.builds(Point, NUMBERS, NUMBERS)
LIMITS = st.tuples(COUNTS, COUNTS).map(lambda bounds: Limits(min(bounds), max(bounds)))
RECORDS = st.builds(
    Record,
    TEXTS,
    COUNTS,
    NUMBERS,
    st.booleans(),
    st.sampled_from(Color),
    st.lists(POINTS, max_size=3).map(tuple),
    st.dictionaries(NAMES, NUMBERS, max_size=3),
    st.dictionaries(st.sampled_from(Color), COUNTS),
    LIMITS,
    parent=st.none() | POINTS,
    renamed=TEXTS,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=6,
)
"""Any values of JSON, and the numbers beside them that Python writes."""


def read(value: Any) -> Record:
    return read_record(Entry(value, "file.json", RecordError, "write it anew"), Record)


def places(value: Any) -> list[tuple[Any, Any]]:
    """The containers in a value of JSON, each with every key of it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@given(RECORDS)
def test_records_survive_files(record):
    found = written(record)
    found["squared"] = int(found["squared"])
    assert read(json.loads(json.dumps(found))) == record


def test_keys_are_the_names_of_fields_or_what_their_metadata_say():
    record = Record("a", 1, 0.5, True, Color.RED, (Point(1.0),), {"w": 2.0}, {Color.BLUE: 3}, Limits(5))
    assert written(record) == {
        "title": "a",
        "count": 1,
        "ratio": 0.5,
        "is_new": True,
        "color": "red",
        "points": [{"x": 1.0, "y": 0.0}],
        "weights": {"w": 2.0},
        "of_colors": {"blue": 3},
        "low": 5,
        "high": 7,
        "squared": "4",
        "parent": None,
        "class": "",
    }


@given(RECORDS, VALUES, st.data())
def test_damaged_records_are_read_or_refused_with_the_error_of_the_file(record, value, data):
    """One value is replaced by any other, taken out, or joined by one with a new key."""
    found = copy.deepcopy(written(record) | {"squared": 4})
    container, key = data.draw(st.sampled_from(places(found)))
    match data.draw(st.sampled_from(("replace", "remove", "add"))):
        case "replace":
            container[key] = value
        case "remove":
            del container[key]
        case "add" if isinstance(container, dict):
            container["new"] = value
    try:
        again = read(found)
    except RecordError as error:
        assert str(error).startswith("file.json") and str(error).endswith("; write it anew")
    else:
        assert written(again).keys() == written(record).keys()


@pytest.mark.parametrize("key", ["title", "low", "color"])
def test_what_has_no_default_must_be_there(key):
    record = Record("a", 1, 0.5, True, Color.RED, (), {}, {}, Limits(5))
    found = written(record) | {"squared": 4}
    del found[key]
    with pytest.raises(RecordError, match=rf"file.json must be an object with .*, got none with {key}; write it anew"):
        read(found)


def test_an_error_of_a_part_has_its_place():
    found = written(Record("a", 1, 0.5, True, Color.RED, (Point(1.0),), {}, {}, Limits(5))) | {"squared": 4}
    found["points"][0]["x"] = "far"
    with pytest.raises(RecordError, match=r"^file.json: points\[0\].x must be a finite number from 0 up, got 'far'"):
        read(found)
    found["points"], found["low"] = [], 8
    with pytest.raises(RecordError, match=r"^file.json: low must be at most high, got 8 and 7; write it anew$"):
        read(found)
