"""The verbs about compressors: their table, and the functions that are generated for them."""

from __future__ import annotations

import json

import pytest

import gckernels
from gckernels.sync import commands
from gckernels.sync.commands.compressors import compressors, compressors_table


def test_the_columns_of_the_table_stand_below_each_other():
    head, *rows = compressors_table(compressors()).splitlines()
    assert len(rows) == len(gckernels.COMPRESSORS)
    for title in ("feedback", "summable"):
        column = head.index(title)
        assert {row[column : column + 4].split()[0] for row in rows} == {"yes", "no"}, title
        assert {row[column - 2 : column] for row in rows} == {"  "}
    end = head.index("bytes/element") + len("bytes/element")
    assert all(row[end - 5] == "." and row[end] == " " for row in rows)


def test_every_method_is_in_the_table(capsys):
    rows = compressors_table(compressors()).splitlines()[1:]
    assert [row.partition("(")[0] for row in rows] == sorted(gckernels.COMPRESSORS)
    assert commands.main(["compressors", "--json"]) == 0
    assert [each["compressor"].partition("(")[0] for each in json.loads(capsys.readouterr().out)] == sorted(
        gckernels.COMPRESSORS
    )


@pytest.mark.parametrize(
    ("language", "line"), [("--triton", "t_ge_0 = values >= 0.0"), ("--c", "bool_t t_ge_0 = (float)(v) >= (float)(")]
)
def test_generated_functions_are_shown(language, line, capsys):
    assert commands.main(["show", "EFSignSGD(block=None)", language]) == 0
    text = capsys.readouterr().out
    assert line in text and "quantize(" in text
    assert commands.main(["show", "EFSignSGD(block=None)", language, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.pop("source").removesuffix("\n") == text.removesuffix("\n")
    assert record == {"compressor": "EFSignSGD(block=None)", "language": language.strip("-")}


@pytest.mark.parametrize(("spec", "reason"), [("TopK", "TopK has no generated"), ("Nothing", "Nothing")])
def test_what_has_no_generated_functions_is_refused_by_name(spec, reason, capsys):
    assert commands.main(["show", spec, "--c"]) == 2
    error = capsys.readouterr().err
    assert reason in error and "gckernels compressors lists" in error
