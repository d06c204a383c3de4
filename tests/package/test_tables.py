"""The generated parts of the documentation are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "tables.py"
_spec = importlib.util.spec_from_file_location("tables", SCRIPT)
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


@pytest.mark.parametrize(("path", "text"), [pytest.param(*page, id=page[0].name) for page in tables.pages().items()])
def test_page(path, text):
    assert path.read_text(encoding="utf-8") == text, "run `make tables`"
