"""Progress and notes of a command on stderr, from one rank."""

from __future__ import annotations

import os
import sys


class Console:
    """The lines of a command on stderr. Ranks other than 0 print nothing.

    Args:
        verb: its name, with which they begin.
    """

    def __init__(self, verb: str) -> None:
        self.verb, self.speaks = verb, os.environ.get("RANK", "0") == "0"  # torchrun sets it
        self._has_bar = False

    def note(self, text: object) -> None:
        """Print a line about the run: a warning, a file that is written."""
        if self.speaks:
            self.clear_bar()
            print(f"gckernels {self.verb}: {text}", file=sys.stderr, flush=True)

    def progress(self, share: float, text: str = "") -> None:
        """Draw a bar, if stderr is a terminal.

        Args:
            share: the part that is done, from 0 to 1.
            text: a few words on what is being done.
        """
        if self.speaks and sys.stderr.isatty():
            filled = round(min(max(share, 0.0), 1.0) * 30)
            line = f"{'#' * filled}{'.' * (30 - filled)} {share:4.0%} {text}"
            print(f"\r\033[K{line[:100]}", end="", file=sys.stderr, flush=True)
            self._has_bar = True

    def clear_bar(self) -> None:
        """Remove the bar."""
        if self._has_bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._has_bar = False
