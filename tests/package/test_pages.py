"""The pages of the documentation are true: their code runs, and the files and commands that they name exist."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import gckernels
import gckernels.sync.lab
from cases import cases
from gckernels import patches, planner, sync
from pages import PAGES, ROOT, programs, run_program
from ranks import run_ranks, values_of

WITH_CODE = [page for page in PAGES if programs(page)]
WRITTEN = ("bench/results/cuda",)  # written by the GPU targets
FOLDERS = "bench|docs|examples|gckernels|patches|planner|sync|tests"


def _name(page):
    return str(page.relative_to(ROOT))


EVERY = [pytest.param(page, id=_name(page)) for page in (*PAGES, ROOT / "CONTRIBUTING.md")]


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_code_runs(page, tmp_path):
    every = programs(page)
    missing = {each.package for each in every if each.package and importlib.util.find_spec(each.package) is None}
    for number, program in enumerate(each for each in every if each.package not in missing):
        name = f"{page.stem}_{number}"
        path = tmp_path / f"{name}.py"
        path.write_text(program.source)
        keeps = bool(program.package)  # a trainer keeps settings in its process
        values_of(run_ranks(program.ranks, run_program, name, str(path), str(tmp_path), fresh=keeps, exits=False))
    if missing:
        pytest.skip(f"the rest has run; some examples need the extras {', '.join(sorted(missing))}")


@pytest.mark.parametrize("module", [gckernels, sync, patches, planner, sync.lab], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    reference = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    directives = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (?:gckernels\.)?(\w+)$", reference, re.MULTILINE))
    public = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
    assert not public - directives


@cases("page", EVERY)
def test_files_and_modules_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})(?:/[\w*-]+)+(?:\.(?:py|c|md|csv|png|svg|json))?\b/?", text)
    missing = {path for path in named if not list(ROOT.glob(path.rstrip("/"))) and path not in WRITTEN}
    modules = set(re.findall(rf"-m ((?:{FOLDERS})(?:\.\w+)+)", text))
    missing |= {module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").exists()}
    assert not missing


@cases("page", EVERY)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`(?:sudo )?make ([a-z-]+)", page.read_text(encoding="utf-8"))) <= targets
