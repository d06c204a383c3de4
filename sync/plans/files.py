"""Files of JSON: written whole or not at all, and read with errors that say what to do."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that it never exists in part: it has the old content until it has all of the new one.

    Raises:
        OSError: the folder is missing or full, or cannot be written to. An existing file is as it was.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON value in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold JSON; the text says where it ends to be JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("too many nested lists and objects") from error
