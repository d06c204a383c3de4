"""Tests of the bound of a step, and of the columns that say where a traced step spends the rest."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.bounds import Alone, Slice, Step, codec_s, link_nbytes, read_steps, rest_of
from gckernels.sync import Topology

PARTS = ("computing", "gradients", "encoding", "threads", "ranks", "wire", "ending")


def parts(rest):
    return {name: getattr(rest, f"rest_of_{name}_s") for name in PARTS}


def test_the_larger_of_backward_and_wire_counts():
    assert Alone(1, 2, 4, 3, wire_s=1).bound_s() == 7
    assert Alone(1, 2, 4, 3, wire_s=1).bound_s(with_ddp=True) == 8
    assert Alone(1, 2, 4, 3, wire_s=8).bound_s(16, 32) == 61


def message(number, submitted, *stages):
    """Slices given as ``(communicates, start, end)``."""
    return tuple(Slice(number, index, kind, submitted, start, end) for index, (kind, start, end) in enumerate(stages))


def test_every_second_beyond_the_bound_has_a_cause():
    first = message(0, 12, (False, 12, 13), (True, 14, 20), (False, 20, 21))
    second = message(1, 18, (False, 19, 23), (True, 23, 29), (False, 30, 32))
    step = Step(begin=0, backward=10, averaged=33, end=36, slices=first + second)
    late = Step(0, 10, 33, 35, message(0, 12, (False, 12, 13), (True, 16, 20)) + second)
    # the other rank begins the first collective two seconds later
    rest = rest_of([step, late], Alone(forward_s=9, backward_s=9, optimizer_s=2, ddp_backward_s=9, wire_s=8))
    assert (rest.encode_first_s, rest.decode_last_s, rest.codec_s, rest.last_submitted_s) == (1, 2, 8, 8)
    assert rest.rest_s == 36 - (9 + 9 + 2 + 1 + 2)
    assert parts(rest) == {
        "computing": 2,  # forward and optimizer, one second each
        "gradients": 2 - 1,  # 10 to 12; backward alone takes a second longer than the wire
        "encoding": 1 + 3 - 1,  # 12 to 13, 20 to 23; the first encoding is part of the bound
        "threads": 1,  # 13 to 14
        "ranks": 2,  # 14 to 16
        "wire": 2,  # 16 to 20, 23 to 29
        "ending": 4 - 2,  # 29 to 33; the last decoding is part of the bound
    }


def test_bytes_that_leave_a_machine():
    def sent(name, nbytes):
        return Slice(0, 0, True, 0, 0, 0, name, nbytes)

    some = [sent("AllGather", 6), sent("AllToAll", 12), Slice(0, 0, False, 0, 0, 0, "Encode", 0)]
    assert link_nbytes(some, Topology(4)) == 18
    assert link_nbytes(some, Topology(2, 2)) == 6 + 2 * 8  # two of three receivers are on the other machine
    assert link_nbytes([sent("ReduceScatter(intra)", 5), sent("AllToAll(inter)", 3)], Topology(2, 2)) == 6


def test_a_step_without_collectives_has_no_rest():
    assert rest_of([Step(0, 1, 2, 3, ())], Alone(1, 1, 1, 1, 1)) is None
    assert codec_s(()) == 0


times = st.lists(st.integers(0, 60), min_size=6, max_size=6).map(sorted)


@given(st.lists(times, min_size=1, max_size=4), st.integers(0, 30))
def test_parts_sum_up_to_the_rest(messages, wire_s):
    slices = ()
    for number, (submitted, *ticks) in enumerate(messages):
        encode, sent, received, decode, decoded = (10 + tick for tick in ticks)
        stages = ((False, encode, sent), (True, sent, received), (False, decode, decoded))
        slices += message(number, 10 + submitted, *stages)
    step = Step(0, 10, 75, 80, slices)
    rest = rest_of([step, dataclasses.replace(step, end=79)], Alone(8, 20, 4, 24, wire_s))
    assert sum(parts(rest).values()) == pytest.approx(rest.rest_s)


def test_steps_of_a_trace_are_on_one_clock(tmp_path):
    path = tmp_path / "trace.json"
    args = {"message": 3, "stage": 1, "submitted_us": 0.5, "bytes": 7}
    event = {
        "ph": "X",
        "name": "AllGather",
        "pid": 1,
        "tid": 0,
        "cat": "communicate",
        "ts": 2.0,
        "dur": 4.0,
        "args": args,
    }
    begun = event | {"args": args | {"begun_us": 1.0, "stage": 2}}
    clock = {"started_ns": 1_000_000, "anchor_ns": {"rank 0": 1_000_000, "rank 1": 999_000}}
    path.write_text(json.dumps({"traceEvents": [event, begun], "otherData": clock}))
    first, second = read_steps(path, [(0, 1000, 2000, 3000), (1000, 2000, 3000, 4000)])
    assert dataclasses.astuple(first)[:4] == pytest.approx((0, 1e-6, 2e-6, 3e-6))
    assert first.slices == ()
    assert (second.begin, second.end) == pytest.approx((0, 3e-6))
    assert [dataclasses.astuple(each) for each in second.slices] == [
        (3, 1, True, pytest.approx(0.5e-6), pytest.approx(2e-6), pytest.approx(6e-6), "AllGather", 7),
        (3, 2, True, pytest.approx(0.5e-6), pytest.approx(1e-6), pytest.approx(6e-6), "AllGather", 7),
    ]
