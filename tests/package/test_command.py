"""The command prints its table, and can be started in two ways."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gckernels
from gckernels.sync import cli


def test_the_columns_of_the_table_stand_below_each_other():
    head, *rows = cli.compressors_table().splitlines()
    assert len(rows) == len(gckernels.METHODS)
    for title in ("feedback", "summable"):
        column = head.index(title)
        assert {row[column : column + 4].split()[0] for row in rows} == {"yes", "no"}, title
        assert {row[column - 2 : column] for row in rows} == {"  "}
    end = head.index("bytes/element") + len("bytes/element")
    assert all(row[end - 5] == "." and row[end] == " " for row in rows)


def test_every_method_is_in_the_table():
    rows = cli.compressors_table().splitlines()[1:]
    assert [row.partition("(")[0] for row in rows] == sorted(gckernels.METHODS)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gckernels {gckernels.__version__}\n"


def test_it_runs_as_a_module():
    ran = subprocess.run(
        [sys.executable, "-m", "gckernels", "--version"], capture_output=True, text=True, check=False, timeout=200
    )
    assert (ran.returncode, ran.stdout) == (0, f"gckernels {gckernels.__version__}\n"), ran.stderr


@pytest.mark.parametrize(
    ("language", "line"), [("--triton", "t_ge_0 = values >= 0.0"), ("--c", "bool_t t_ge_0 = (float)(v) >= (float)(")]
)
def test_generated_functions_are_shown(language, line, capsys):
    assert cli.main(["show", "EFSignSGD(block=None)", language]) == 0
    text = capsys.readouterr().out
    assert line in text and "quantize(" in text


@pytest.mark.parametrize(("spec", "reason"), [("TopK", "TopK has no generated"), ("Nothing", "Nothing")])
def test_what_has_no_generated_functions_is_refused_by_name(spec, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["show", spec, "--c"])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
