"""``gckernels compressors``: the table, and the functions that are generated for them."""

from __future__ import annotations

import json

import pytest

import gckernels
from gckernels.planner import commands


def table_of(capsys, *arguments):
    """The lines of the table."""
    assert commands.main(["compressors", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_columns_of_the_table_stand_below_each_other(capsys):
    head, *rows = table_of(capsys)
    assert len(rows) == len(gckernels.COMPRESSORS)
    for title in ("feedback", "summable"):
        column = head.index(title)
        assert {row[column : column + 4].split()[0] for row in rows} == {"yes", "no"}, title
        assert {row[column - 2 : column] for row in rows} == {"  "}
    end = head.index("bytes/element") + len("bytes/element")
    assert all(row[end - 5] == "." and row[end] == " " for row in rows)


def test_every_method_is_in_the_table(capsys):
    rows = table_of(capsys)[1:]
    assert [row.partition("(")[0] for row in rows] == sorted(gckernels.COMPRESSORS)
    assert commands.main(["compressors", "--json"]) == 0
    assert [each["compressor"].partition("(")[0] for each in json.loads(capsys.readouterr().out)] == sorted(
        gckernels.COMPRESSORS
    )


def test_one_method_has_the_settings_of_its_spec(capsys):
    (row,) = table_of(capsys, "QSGD(levels=3)")[1:]
    assert row.startswith("QSGD(levels=3")
    assert commands.main(["compressors", "QSGD(levels=3)", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["compressor"] == row.split("  ")[0]


def test_functions_are_those_of_a_named_compressor(capsys):
    assert commands.main(["compressors", "--c"]) == 2
    assert "none is named; gckernels compressors lists all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("language", "line"), [("--triton", "t_ge_0 = values >= 0.0"), ("--c", "bool_t t_ge_0 = (float)(v) >= (float)(")]
)
def test_generated_functions_are_shown(language, line, capsys):
    assert commands.main(["compressors", "EFSignSGD(block=None)", language]) == 0
    text = capsys.readouterr().out
    assert line in text and "quantize(" in text
    assert commands.main(["compressors", "EFSignSGD(block=None)", language, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.pop("source").removesuffix("\n") == text.removesuffix("\n")
    assert record == {"compressor": "EFSignSGD(block=None)", "language": language.strip("-")}


@pytest.mark.parametrize(("spec", "reason"), [("TopK", "TopK has no generated"), ("Nothing", "Nothing")])
def test_what_has_no_generated_functions_is_refused_by_name(spec, reason, capsys):
    assert commands.main(["compressors", spec, "--c"]) == 2
    error = capsys.readouterr().err
    assert reason in error and "gckernels compressors lists" in error
