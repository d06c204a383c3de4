"""The working directory of ranks on links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from network_namespaces import need_links

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working directory of ranks, from which they can import the package; skips where there are no links."""
    need_links()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return tmp_path
