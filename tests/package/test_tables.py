"""The generated parts of the documentation are up to date, and so are figures in its first sentences."""

from __future__ import annotations

import csv
import re

import pytest

from docs.tables import pages
from processes import ROOT


@pytest.mark.parametrize(("path", "text"), [pytest.param(*page, id=page[0].name) for page in pages().items()])
def test_file(path, text):
    assert path.read_text(encoding="utf-8") == text, "run `make tables`"


FOUR_BITS = "BlockQuant(bits=4)"
TRANSFORMER = {"model": "transformer_10m", "network": "2"}
SENTENCES = [
    ("README.md", r"\*\*([\d.]+) times as fast\*\*", "auto", TRANSFORMER | {"rate": "200mbit"}, ["auto, safe"], True),
    ("README.md", r"takes ([\d.]+) of plain DDP's", "auto", TRANSFORMER | {"rate": "200mbit"}, ["auto, safe"], False),
    (
        "docs/howto/which_compressor.md",
        r"`BlockQuant` takes ([\d.]+) of.+`EFSignSGD` ([\d.]+) and `TopK\(ratio=0.01\)` ([\d.]+),",
        "steps",
        TRANSFORMER | {"rate": "1gbit"},
        ["BlockQuant", "EFSignSGD", "TopK(ratio=0.01)"],
        False,
    ),
]
"""Figures in sentences: the page, a pattern, the results, the cell, the arms, and whether a figure is a speed-up."""


def test_losses_in_the_readme_are_those_of_their_results():
    with open(ROOT / "bench" / "results" / "cpu" / "convergence.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "bytes_lm"]
    bits = [[float(row["bits_per_byte"]) for row in rows if row["compressor"] == arm] for arm in (FOUR_BITS, "none")]
    assert [len(each) for each in bits] == [3, 3]
    (found,) = re.findall(r"ends at ([\d.]+) bits per byte, and at ([\d.]+)", (ROOT / "README.md").read_text())
    assert [*found] == [f"{sum(each) / 3:.3f}" for each in bits]


@pytest.mark.parametrize(("page", "pattern", "results", "cell", "arms", "is_speed_up"), SENTENCES)
def test_figures_in_sentences_are_those_of_their_results(page, pattern, results, cell, arms, is_speed_up):
    with open(ROOT / "bench" / "results" / "cpu" / f"{results}.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if cell.items() <= row.items()]
    ratios = [float(row["ratio_to_plain"]) for arm in arms for row in rows if row["arm"] == arm]
    (found,) = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    expected = [f"{1 / ratio:.1f}" if is_speed_up else f"{ratio:.2f}" for ratio in ratios]
    assert list(found if isinstance(found, tuple) else [found]) == expected
