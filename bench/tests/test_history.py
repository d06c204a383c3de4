"""The history of headline figures: ten of them, which the files of results have, and a row for each change."""

from __future__ import annotations

import sys

from bench import history
from bench.lib.record import read_csv


def test_all_figures_are_in_the_files_of_results():
    rows = [headline.row() for headline in history.HEADLINES]
    assert len(rows) == 10 and all(row is not None and row.keys() == {*history.COLUMNS} for row in rows)
    assert all(float(row["value"]) >= 0 and row["date"] for row in rows)


def test_only_what_has_changed_is_appended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.csv")
    monkeypatch.setattr(sys, "argv", ["history", "--update"])
    history.main()
    history.main()
    first = read_csv(history.HISTORY)
    assert [row["figure"] for row in first] == [headline.name for headline in history.HEADLINES]
    text = history.HISTORY.read_text()
    history.HISTORY.write_text(text.replace(f",{first[3]['value']},", ",99,"))
    capsys.readouterr()
    history.main()
    assert f"{first[3]['value']}, was 99" in capsys.readouterr().out
    assert len(read_csv(history.HISTORY)) == 11
