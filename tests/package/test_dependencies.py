"""The package runs without optional dependencies, and the compressors do not import what is built on them."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gckernels
from gckernels.requirements import TRITON
from ranks import run_ranks, values_of

PACKAGE = Path(gckernels.__file__).parent
ABOVE, TESTING = tuple(PACKAGE / each for each in ("sync", "patches", "planner")), PACKAGE / "testing"


def errors_of_imports() -> list[str]:
    """The errors of importing each package without Triton, and on systems other than Linux."""

    def error_of(name: str) -> str:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == "gckernels"]:
            del sys.modules[loaded]
        try:
            importlib.import_module(name)
        except ImportError as error:
            return str(error)
        return "imported"

    errors, triton, system = [], sys.modules["triton"], sys.platform
    for name in ("gckernels", "gckernels.sync", "gckernels.patches", "gckernels.planner"):
        sys.modules["triton"] = None
        errors.append(error_of(name))
        sys.modules["triton"] = triton
        for sys.platform in ("darwin", "win32"):
            errors.append(error_of(name))
        sys.platform = system
    return errors


def test_the_import_says_what_is_missing():
    """Runs in a process of its own, because it takes the package's modules away."""
    (errors,) = values_of(run_ranks(1, errors_of_imports, fresh=True, exits=False))
    expected = [
        f"gckernels needs Triton, .*: pip install '{re.escape(TRITON)}'",
        "gckernels runs on Linux .*, not on darwin",
        "gckernels runs on Linux .*, not on win32",
    ] * 4
    assert len(errors) == len(expected), errors
    for pattern, error in zip(expected, errors, strict=True):
        assert re.match(pattern, error), error


def test_the_metadata_name_the_same():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert f"{TRITON}; platform_system == 'Linux'" in project["dependencies"]
    assert "Operating System :: POSIX :: Linux" in project["classifiers"]


def test_tests_run_with_the_pythons_and_the_oldest_versions_that_the_metadata_allow(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    checkout = PACKAGE.parent
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(checkout / name, tmp_path)
    subprocess.run(["make", "--silent", "build/versions/oldest.txt"], cwd=tmp_path, check=True, timeout=60)
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    bounds = [re.match(r"(\w+)>=([\d.]+)", each).groups() for each in project["dependencies"]]
    oldest = (tmp_path / "build" / "versions" / "oldest.txt").read_text().splitlines()
    assert oldest == [f"{name}=={version}" for name, version in bounds]
    tested = re.findall(r"^PYTHON_\w+ \?= python(3\.\d+)$", (checkout / "Makefile").read_text(), re.MULTILINE)
    declared = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each]
    assert tested == declared and project["requires-python"] == f">={declared[0]}"


def test_a_checkout_is_a_whole_package_wherever_it_lies():
    """Python in the checkout's folder imports the checkout, whatever is installed, because relative links lead to
    ``sync/`` and the like."""
    for part in ("sync", "patches", "planner"):
        assert os.readlink(Path(__file__).parents[2] / "gckernels" / part) == f"../{part}"


def test_the_library_imports_nothing_that_is_built_on_it():
    """The dependency goes one way. Two parts are excepted: ``__main__``, which is run and never imported, and
    ``testing``, which is for tests and benchmarks."""
    outside = (*ABOVE, TESTING, PACKAGE / "__main__.py")
    files = [file for file in PACKAGE.rglob("*.py") if not {file, *file.parents} & {*outside}]
    assert len(files) > 50
    for file in files:
        imported = set(_imports(ast.parse(file.read_text())))
        assert not imported & {"sync", "patches", "planner", "testing", "__main__"}, file


def _imports(tree: ast.AST) -> Iterator[str]:
    """All parts of all names that a module imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield from alias.name.split(".")
