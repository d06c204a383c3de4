"""Tests of the busy times computed from a trace."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.spans import Busy, Span, busy, common, length, outside, read_trace, union

END = 24
intervals = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))
spans = st.builds(
    lambda interval, communicates, message: Span(*interval, communicates, (0, message)),
    intervals,
    st.booleans(),
    st.sampled_from("abc"),
)


def ticks(found):
    """The whole seconds of intervals with whole ends."""
    return {tick for start, end in found for tick in range(start, end)}


def compute(start, end, message):
    return Span(start, end, False, (0, message))


def communicate(start, end, message):
    return Span(start, end, True, (0, message))


def test_two_parts_hide_behind_each_other():
    # the second part is encoded while the first is sent; the first is decoded while the second is sent
    found = busy(
        [
            *(compute(0, 2, "a"), communicate(2, 6, "a"), compute(6, 7, "a")),
            *(compute(2, 4, "b"), communicate(6, 10, "b"), compute(10, 11, "b")),
        ]
    )
    assert found == Busy(compute_s=6, communicate_s=8, either_s=11, hidden_s=3, span_s=11)
    assert found.hidden_share == 0.5


def test_one_part_hides_nothing():
    found = busy([compute(1, 3, "a"), communicate(4, 8, "a"), compute(8, 9, "a")])
    assert found == Busy(compute_s=3, communicate_s=4, either_s=7, hidden_s=0, span_s=8)


def test_a_message_does_not_hide_behind_itself():
    own = [compute(0, 4, "a"), communicate(0, 4, "a")]
    assert busy(own).hidden_s == 0
    assert busy([*own, communicate(1, 2, "b")]).hidden_s == 1
    assert busy([compute(0, 4, "a"), Span(0, 4, True, (1, "a"))]).hidden_s == 4  # the message of another step


def test_lanes_that_compute_together_count_once():
    found = busy([compute(0, 4, "a"), compute(2, 6, "b"), communicate(3, 5, "c"), communicate(4, 7, "d")])
    assert found == Busy(compute_s=6, communicate_s=4, either_s=7, hidden_s=3, span_s=7)


def test_nothing_has_run():
    assert busy([]) == Busy(0, 0, 0, 0, 0)
    assert busy([communicate(1, 2, "a")]).hidden_share == 0


@given(st.lists(intervals))
def test_a_union_has_the_same_points_apart_and_in_order(some):
    found = union(some)
    assert ticks(found) == ticks(some)
    assert length(some) == len(ticks(some))
    assert all(first[1] < second[0] for first, second in itertools.pairwise(found))


@given(st.lists(intervals), st.lists(intervals))
def test_what_two_unions_have_in_common(some, others):
    assert ticks(common(union(some), union(others))) == ticks(some) & ticks(others)


@given(st.lists(intervals), st.lists(intervals))
def test_the_part_of_a_union_outside_another(some, whole):
    found = outside(union(some), union(whole))
    assert ticks(found) == ticks(whole) - ticks(some)
    assert length(found) == len(ticks(found))


@given(st.lists(spans, max_size=12))
def test_busy_counts_seconds(some):
    found = busy(some)
    computing, communicating = (
        ticks(span.interval for span in some if span.communicates == kind) for kind in (False, True)
    )
    hidden = {
        tick
        for tick in range(END)
        for one in some
        for other in some
        if not one.communicates and other.communicates and one.message != other.message
        if tick in ticks([one.interval]) & ticks([other.interval])
    }
    assert (found.compute_s, found.communicate_s) == (len(computing), len(communicating))
    assert (found.either_s, found.hidden_s) == (len(computing | communicating), len(hidden))
    assert 0 <= found.hidden_share <= 1 and found.either_s <= found.span_s <= END


def test_spans_of_a_trace(tmp_path):
    def event(rank, kind, ts, dur, step, units):
        return {"ph": "X", "pid": rank, "tid": 0, "cat": kind, "ts": ts, "dur": dur} | {
            "args": {"step": step, "units": units, "bytes": 0}
        }

    name = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}
    events = [
        name,
        event(0, "compute", 0.0, 1.5e6, 3, ["a", "b"]),
        event(1, "communicate", 2e6, 0.5e6, 4, ["c"]),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path)
    assert found == {0: [Span(0.0, 1.5, False, (3, "a", "b"))], 1: [Span(2.0, 2.5, True, (4, "c"))]}
    assert busy(found[0]).compute_s == pytest.approx(1.5)
