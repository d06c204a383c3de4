"""Everything that a command prints: results on stdout, progress and errors on stderr, from one rank."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def is_first_rank() -> bool:
    """Whether this process is rank 0 of torchrun, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


class Console:
    """The output of one command. Ranks other than 0 print nothing.

    Args:
        verb: its name, with which lines on stderr begin.
        as_json: whether results are JSON instead of tables.
        to_stderr: whether results go to stderr, because a file is written to stdout.
    """

    def __init__(self, verb: str, as_json: bool = False, to_stderr: bool = False) -> None:
        self.verb, self.as_json = verb, as_json
        self.speaks = is_first_rank()
        self._results = sys.stderr if to_stderr else sys.stdout
        self._has_bar = False

    def show(self, text: str) -> None:
        """Print results for people. Nothing is printed with ``--json``."""
        if self.speaks and not self.as_json:
            print(text, file=self._results)

    def record(self, values: Any) -> None:
        """Print results as JSON. Nothing is printed without ``--json``."""
        if self.speaks and self.as_json:
            print(json.dumps(values, indent=1, allow_nan=False), file=self._results)

    def note(self, text: object) -> None:
        """Print a line about the run on stderr: a warning, a file that is written."""
        if self.speaks:
            self._clear_bar()
            print(f"gckernels {self.verb}: {text}", file=sys.stderr, flush=True)

    def progress(self, share: float, text: str = "") -> None:
        """Draw a bar on stderr, if that is a terminal.

        Args:
            share: the part that is done, from 0 to 1.
            text: a few words on what is being done.
        """
        if self.speaks and sys.stderr.isatty():
            filled = round(min(max(share, 0.0), 1.0) * 30)
            line = f"{'#' * filled}{'.' * (30 - filled)} {share:4.0%} {text}"
            print(f"\r\033[K{line[:100]}", end="", file=sys.stderr, flush=True)
            self._has_bar = True

    def _clear_bar(self) -> None:
        if self._has_bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._has_bar = False

    def close(self) -> None:
        """Remove the bar, and write out what is printed."""
        self._clear_bar()
        sys.stdout.flush()
