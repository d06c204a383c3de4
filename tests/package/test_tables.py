"""The generated parts of the documentation are up to date."""

from __future__ import annotations

import pytest

from docs.tables import pages


@pytest.mark.parametrize(("path", "text"), [pytest.param(*page, id=page[0].name) for page in pages().items()])
def test_file(path, text):
    assert path.read_text(encoding="utf-8") == text, "run `make tables`"
