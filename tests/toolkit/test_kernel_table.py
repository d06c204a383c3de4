"""Tests of the table of kernels: how records become rows, and which changes are regressions."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.machine_code.kernel_table import COLUMNS, made_with, regressions, rows

RECORD = {
    "spec": "Identity",
    "call": "decode",
    "variant": "aligned",
    "kernel": "_decode_kernel",
    "capability": 90,
    "num_warps": 4,
    "tile_numel": 2048,
    "registers": 40,
    "stack_nbytes": 0,
    "shared_nbytes": 64,
    "instructions": 360,
    "instructions_per_element": 22.5,
    "tensors": {"out": ["out_ptr"]},
    "accesses": [
        {"argument": "payload_ptr", "kind": "load", "nbytes": 2, "count": 8},
        {"argument": "out_ptr", "kind": "store", "nbytes": 16, "count": 8},
        {"argument": "out_ptr", "kind": "store", "nbytes": 4, "count": 2},
    ],
}


def with_stores(*widths: tuple[int, int]) -> dict:
    """A change of facts: stores to ``out``, given as ``(bytes, count)``."""
    stores = [{"argument": "out_ptr", "kind": "store", "nbytes": nbytes, "count": count} for nbytes, count in widths]
    return {"accesses": stores}


def test_rows_are_sorted_and_complete():
    records = [RECORD | {"capability": 100}, RECORD | {"spec": "Cast16"}, RECORD]
    table = rows(records)
    assert [(row["configuration"], row["capability"]) for row in table] == [
        ("Cast16", "90"),
        ("Identity", "90"),
        ("Identity", "100"),
    ]
    assert all(tuple(row) == COLUMNS for row in table)
    assert table[0]["accesses"] == "out store 16+2"
    assert rows(records[::-1]) == table


def test_kernel_that_is_launched_twice_has_two_rows():
    table = rows([RECORD, RECORD | {"registers": 50}])
    assert [(row["kernel"], row["registers"]) for row in table] == [
        ("_decode_kernel", "40"),
        ("_decode_kernel 2", "50"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": 41, "instructions": 368}, "registers 40 -> 41, instructions 360 -> 368"),
        ({"stack_nbytes": 8}, "stack_nbytes 0 -> 8"),
        ({"shared_nbytes": 1024}, "shared_nbytes 64 -> 1024"),
        ({"instructions_per_element": 45.0}, "instructions_per_element 22.5 -> 45"),
        (with_stores((8, 16)), "out store 16+2 -> 8"),
        (with_stores((16, 8), (2, 3)), "out store 16+2 -> 16+3"),
        ({"tensors": {"grad": ["payload_ptr"], "out": ["out_ptr"]}}, "grad load none -> 2"),
    ],
)
def test_worse_facts_are_named_with_old_and_new_values(change, message):
    found = regressions(rows([RECORD]), rows([RECORD | change]))
    assert found == [f"Identity, decode, aligned, _decode_kernel, sm_90: {message}"]


@pytest.mark.parametrize(
    "change", [{"registers": 32}, {"instructions": 8}, {"num_warps": 8}, with_stores((16, 9)), {"accesses": []}]
)
def test_better_facts_need_no_update(change):
    assert regressions(rows([RECORD]), rows([RECORD | change])) == []


def test_rows_that_one_table_lacks_are_named():
    old, new = rows([RECORD]), rows([RECORD | {"capability": 100}])
    name = "Identity, decode, aligned, _decode_kernel, sm_"
    assert regressions(old, new) == [
        f"{name}100: not in the table",
        f"{name}90: in the table, but no such kernel is launched",
    ]
    assert regressions([], old) == [f"{name}90: not in the table"]


def test_committed_table_has_the_columns_and_one_version():
    with (Path(__file__).parents[2] / "bench/results/kernels.csv").open(newline="") as file:
        table = csv.DictReader(file)
        assert tuple(table.fieldnames or ()) == COLUMNS
        assert "," not in made_with(list(table))
