"""Names say one thing each."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import gckernels
from gckernels import patches, planner, sync

PACKAGE = Path(gckernels.__file__).parent


def test_no_two_public_classes_have_one_name():
    places, folders = defaultdict(list), (PACKAGE / each for each in ("", "sync", "patches", "planner"))
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.resolve())
    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(set(paths)) > 1} == {}


@pytest.mark.parametrize("package", [gckernels, sync, patches, planner], ids=lambda package: package.__name__)
def test_no_public_name_hides_a_module(package):
    """Otherwise ``import gckernels.sync.attach.x`` would find a function in place of the folder."""
    folder = Path(package.__file__).parent
    modules = {path.stem if path.is_file() else path.name for path in folder.iterdir() if path.name[0] not in "_."}
    functions = {name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)}
    assert functions & modules == set()
