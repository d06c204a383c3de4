"""The table in ``docs/operators.md`` says of every compressor what the compressor itself says."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import pytest
from configurations import DEFAULTS, OURS, parametrize

from gckernels.toolkit.sparsifier import Sparsifier

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
NUMEL = 2**20
ONCE_NBYTES = 64  # header, padding of two fields and two numbers per unit, which a size per element leaves out
_NAMES = {"ceil": math.ceil, "log2": math.log2}


def _table() -> dict[str, list[str]]:
    """The cells of every row, without backquotes, by class name."""
    lines = PAGE.read_text(encoding="utf-8").split("## All operators")[1].splitlines()
    cells = [[cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")] for line in lines if "(" in line]
    return {row[0].partition("(")[0]: row for row in cells if len(row) == 8}


TABLE = _table()


def test_every_compressor_has_a_row():
    missing = {name: f"{DEFAULTS[name].payload_nbytes(NUMEL):,} bytes" for name in OURS - TABLE.keys()}
    assert not missing
    assert not TABLE.keys() - OURS


@pytest.mark.parametrize("name", sorted(OURS))
def test_row(name):
    compressor = DEFAULTS[name]
    call, functions, _, nbytes, feedback, summable, stochastic, source = TABLE[name]
    assert sorted(re.findall(r"\w+", call)) == sorted([name, *compressor.config_fields])
    assert functions == f"{compressor.op_name}_*"
    assert nbytes == f"{compressor.payload_nbytes(NUMEL):,}"
    for cell, flag in (
        (feedback, compressor.needs_feedback),
        (summable, compressor.summable),
        (stochastic, compressor.stochastic),
    ):
        assert re.match(r"\w+", cell)[0] == ("yes" if flag else "no")
    assert source


@parametrize(lambda compressor: compressor.name in OURS)
def test_bytes_per_element(compressor):
    """The formula, for every configuration."""
    fields = {field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor)}
    if fields.get("block", 0) is None:
        fields["block"] = math.inf
    if isinstance(compressor, Sparsifier):
        fields["low"] = max(0, min(math.ceil(math.log2(1 / compressor.ratio)) - 1, 11))  # as the page says
    formula = ast.parse(TABLE[compressor.name][2], mode="eval")
    per_element = eval(compile(formula, str(PAGE), "eval"), {"__builtins__": {}} | _NAMES, fields)
    assert 0 <= compressor.payload_nbytes(NUMEL) - per_element * NUMEL <= ONCE_NBYTES
