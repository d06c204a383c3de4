"""Examples in the documentation: the Python code of a page, in its order, as programs for ranks.

Every fenced ``python`` block of a page is run. Hidden comments in the page add the definitions that an example assumes,
such as a model, and assertions about its results::

    <!-- run on 2 ranks
    network = torch.nn.Linear(8, 8)
    -->

The first line of such a comment starts a new program, with new names, on the given number of ranks. A page starts with
a program on one rank. ``<!-- run`` without a number continues the same program. All programs of a page run in the same
folder, one after the other. With ``<!-- run on 2 ranks with lightning`` the program needs a package, without which it
is left out. Each has ``torch``, ``dist``, ``gckernels``, ``sync`` and ``DistributedDataParallel``
imported only if its page imports them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PIECES = re.compile(
    r"^```python\n(?P<block>.*?)^```$|"
    r"^<!-- run(?: on (?P<ranks>\d+) ranks?(?: with (?P<package>\w+))?)?\n(?P<hidden>.*?)^-->$",
    re.S | re.M,
)


@dataclass
class Program:
    """Code that is run on ``ranks`` ranks, and needs a ``package`` if it has a name; lines are where they are in the
    page."""

    ranks: int = 1
    package: str = ""
    lines: list[str] = field(default_factory=list)

    def add(self, code: str, line: int) -> None:
        self.lines += [""] * (line - len(self.lines)) + code.splitlines()

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


def programs(page: Path) -> list[Program]:
    """The programs of a page that have any code."""
    text = page.read_text(encoding="utf-8")
    found = [Program()]
    for piece in _PIECES.finditer(text):
        if piece["ranks"]:
            found.append(Program(int(piece["ranks"]), piece["package"] or ""))
        code = piece["block"] if piece["hidden"] is None else piece["hidden"]
        found[-1].add(code, text.count("\n", 0, piece.start()) + 1)
    return [program for program in found if "".join(program.lines).strip()]


def run_program(name: str, path: str, folder: str) -> None:
    """Import a program as the module ``name``: Triton reads the source of kernels from a file. Runs in a rank."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    handlers, level = list(logging.root.handlers), logging.root.level
    with contextlib.chdir(folder), warnings.catch_warnings():
        try:
            spec.loader.exec_module(sys.modules[name])
        finally:  # other programs run in this process later
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
