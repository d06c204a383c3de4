"""``docs/tutorials/new_compressor.md`` is true: its code runs, is short, and works with everything that it names."""

from __future__ import annotations

import ast
import re

import pytest

from new_compressor import COMPRESSOR, DOCUMENT, run, written
from processes import ROOT


def test_it_is_short():
    lines = [line for line in COMPRESSOR.splitlines() if line.strip()]
    assert len(lines) <= 25


def code_lines(source: str) -> int:
    """The number of lines that are not blank, comments or docstrings."""
    left = set(range(1, source.count("\n") + 2))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            left -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [line.strip() for line in source.splitlines()]
    return sum(1 for number, line in enumerate(lines, 1) if number in left and line and not line.startswith("#"))


def test_the_table_counts_what_is_there():
    rows = re.findall(r"^\| .*`(\w+)`.*? \| (\d+) \|", DOCUMENT, re.MULTILINE)
    assert len(rows) == 11
    for name, lines in rows:
        source = (ROOT / "gckernels" / "ops" / f"{name.lower()}.py").read_text()
        assert code_lines(source) == int(lines), name


def test_the_command_lists_it(tmp_path):
    written(tmp_path)
    listed = run(tmp_path, "-c", "import laplace3; from gckernels.planner.commands import main; main(['compressors'])")
    (line,) = (line for line in listed.splitlines() if "Laplace3" in line)
    assert line in DOCUMENT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_conformance_suite_takes_it_up(tmp_path):
    """Its quick part passes, with one kind of nasty gradient and without ahead-of-time compilation."""
    written(tmp_path)
    chosen = "Laplace3 and not nasty and not seeds and not sizes and not inductor and not gradient"
    output = run(
        *(tmp_path, "-m", "pytest", "-p", "laplace3", "-p", "no:cacheprovider", "-q"),
        *("-m", "not slow and not gpu", "-k", chosen, "tests/conformance"),
        "--ignore=tests/conformance/test_compile.py",  # its tests that are not slow are of other compressors
    )
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed.group(1)) > 40, output
