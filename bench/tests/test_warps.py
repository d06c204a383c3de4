"""Numbers of warps: how many an SM holds, and which other choice would be better."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kernels import warps
from harness.machine_code import pipes

TABLE = Path(__file__).parents[1] / "results" / "warps.csv"


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared_nbytes", "expected"),
    [
        (4, 32, 0, 64),  # all that there may be
        (4, 128, 0, 16),  # 65536 registers hold 16 warps with 128 each
        (4, 129, 0, 12),  # they are given out by eights: 15 warps would fit, but programs of 4
        (8, 255, 0, 8),
        (1, 32, 0, 32),  # no more than 32 programs
        (4, 32, 100 * 1024, 8),  # two programs share the shared memory
    ],
)
def test_warps_that_an_sm_holds(num_warps, registers, shared_nbytes, expected):
    assert warps.resident_warps(num_warps, registers, shared_nbytes) == expected


def row(num_warps: int, ratio: str, chosen: str = "", stack_nbytes: int = 0, loading_nbytes: int = 65536) -> warps.Row:
    where = {"configuration": "QSGD", "call": "encode", "gradient": "fp32", "kernel": "_encode_kernel"}
    numbers = {"num_warps": num_warps, "stack_nbytes": stack_nbytes, "loading_nbytes": loading_nbytes}
    return where | {name: str(value) for name, value in numbers.items()} | {"ratio": ratio, "chosen": chosen}


def test_a_choice_that_another_one_beats_is_named():
    chosen = row(4, "1.00", "yes")
    assert warps.better_ones([chosen, row(8, "0.85")]) == [
        "QSGD, encode, fp32, _encode_kernel: 4 -> 8 warps, 1.00 -> 0.85"
    ]
    assert warps.better_ones([chosen, row(8, "0.95")]) == []
    assert warps.better_ones([chosen, row(8, "0.85", stack_nbytes=8)]) == []
    assert warps.better_ones([chosen, row(8, "0.85", loading_nbytes=8192)]) == []
    assert warps.better_ones([row(4, "0.70", "yes"), row(8, "0.50")]) == []  # the memory is the limit of both


def test_the_committed_choices_spill_nothing():
    table = pipes.read_table(TABLE)
    chosen = [each for each in table if each["chosen"]]
    assert len(chosen) > 100 and {each["triton"] for each in table} == {table[0]["triton"]}
    assert [each for each in chosen if each["stack_nbytes"] != "0"] == []
    # an element that is read by itself takes a sector of 32 bytes, of which only the element's are in the table
    scattered = {("RandomK", "_emit_kernel"), *((each["configuration"], "_sample_kernel") for each in chosen)}
    encodes = [
        each for each in chosen if each["call"] != "decode" and (each["configuration"], each["kernel"]) not in scattered
    ]
    assert [each for each in encodes if int(each["loading_nbytes"]) < warps.ENOUGH_NBYTES] == []
