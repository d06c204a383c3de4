"""The table of entries in ``docs/operators.md`` equals what the benchmark prints."""

from __future__ import annotations

from pathlib import Path

from bench.kernels.entries import table

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_sizes_of_entries_in_the_document_are_those_measured():
    assert table() in PAGE.read_text(encoding="utf-8")
