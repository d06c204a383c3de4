"""Files appear whole or not at all, and those that are read name themselves when they are wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gckernels.planner.commands.common import files
from gckernels.planner.commands.common.outcome import CommandError


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "plan.json"
    files.write(str(path), "one")
    path.chmod(0o600)
    files.write(str(path), b"two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write(str(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def replace(one, other):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CommandError, match=r"plan\.json: cannot be written: No space left on device; name a file"):
        files.write(str(path), "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [(None, 2, "there is no such file"), (b"\xff", 3, "codec can't decode"), (b"{", 3, "Expecting property name")],
)
def test_errors_of_reading_name_the_file_and_a_command(tmp_path, content, code, message):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError, match=message) as raised, files.reading(str(path), "trace"):
        json.loads(Path(path).read_text())
    assert raised.value.code == code
    assert str(raised.value).startswith(f"{path}: ") and str(raised.value).endswith(f"; {files.MAKE['trace']}")
