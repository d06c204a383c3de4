"""No kernel keeps a pipe busier than its row in ``bench/results/pipes.csv`` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton
from configurations import DEFAULTS

from harness.machine_code.kernel_table import made_with
from harness.machine_code.pipes import COLUMNS, busier, read_table
from processes import output_of

TABLE = Path(__file__).parents[2] / "bench" / "results" / "pipes.csv"


def test_committed_table_has_the_columns_and_one_version():
    table = read_table(TABLE)
    assert {tuple(row) for row in table} == {COLUMNS}
    assert "," not in made_with(table)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_kernel_is_busier_than_its_row_in_the_table():
    table = read_table(TABLE)
    if made_with(table) != triton.__version__:
        pytest.skip(f"{TABLE.name} is of Triton {made_with(table)}, installed is {triton.__version__}")
    found = json.loads(output_of(Path(__file__).with_name("busy_pipes.py"), *DEFAULTS, "PowerSGD"))
    assert {row["configuration"] for row in found} == {*DEFAULTS, "PowerSGD"}
    worse = busier(table, found)
    assert not worse, "\n".join([f"not as {TABLE.name} has it:", *worse, "to update it: make kernel-report UPDATE=1"])
