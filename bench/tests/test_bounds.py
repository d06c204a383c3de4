"""Tests of the bound of a step, and of what is read off a trace for it."""

from __future__ import annotations

import json

import pytest

from bench.lib.bounds import Alone, Slice, encode_first_and_decode_last_s, link_nbytes, read_slices
from gckernels.sync import Topology


def test_the_larger_of_backward_and_wire_counts():
    assert Alone(1, 2, 4, 3, wire_s=1).bound_s() == 7
    assert Alone(1, 2, 4, 3, wire_s=1).bound_s(with_ddp=True) == 8
    assert Alone(1, 2, 4, 3, wire_s=8).bound_s(16, 32) == 61


def message(number, *stages):
    """Slices given as ``(communicates, start, end)``."""
    return tuple(Slice(number, index, *each) for index, each in enumerate(stages))


def test_the_first_encoding_and_the_last_decoding_are_hidden_by_nothing():
    first = message(0, (False, 12, 13), (True, 14, 20), (False, 20, 21))
    second = message(1, (False, 19, 23), (True, 23, 29), (False, 30, 32))
    assert encode_first_and_decode_last_s([second + first]) == (1, 2)
    slower = message(0, (False, 12, 15), (True, 15, 20), (False, 20, 26))
    assert encode_first_and_decode_last_s([first + second, slower, slower]) == (3, 6)  # medians
    assert encode_first_and_decode_last_s([(), message(0, (False, 1, 2))]) == (0, 0)


def test_bytes_that_leave_a_machine():
    def sent(name, nbytes):
        return Slice(0, 0, True, 0, 0, name, nbytes)

    some = [sent("AllGather", 6), sent("AllToAll", 12), Slice(0, 0, False, 0, 0, "Encode", 0)]
    assert link_nbytes(some, Topology(4)) == 18
    assert link_nbytes(some, Topology(2, 2)) == 6 + 2 * 8  # two of three receivers are on the other machine
    assert link_nbytes([sent("ReduceScatter(intra)", 5), sent("AllToAll(inter)", 3)], Topology(2, 2)) == 6


def test_slices_of_a_trace_are_by_rank(tmp_path):
    event = {"ph": "X", "name": "AllGather", "pid": 1, "tid": 0, "cat": "communicate", "ts": 2.0, "dur": 4.0}
    later = event | {"args": {"message": 3, "stage": 1, "bytes": 7}}
    first = event | {"pid": 0, "name": "Encode", "cat": "compute", "args": {"message": 0, "stage": 0, "bytes": 0}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "pid": 0, "name": "process_name"}, later, first]}))
    assert read_slices(path) == [
        [Slice(0, 0, False, 2e-6, pytest.approx(6e-6), "Encode", 0)],
        [Slice(3, 1, True, 2e-6, pytest.approx(6e-6), "AllGather", 7)],
    ]
