"""Outputs of the command in the documentation, as it prints them today: ``make tables`` writes them.

A fenced block of ``text`` whose first line is a command line, ``$ gckernels ...``, has its output, and those of further
command lines, which run in the same folder. A line ``...`` behind a command line leaves out all of its output but as
many lines at the end as follow in the page. Times of searches differ from run to run and are left out.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path

from gckernels.planner import commands

_DOCS = Path(__file__).parent
_REFERENCE = _DOCS / "reference" / "commands"
PAGES = tuple(_REFERENCE / f"{verb}.md" for verb in ("plan", "explain"))
"""The pages with outputs."""
LEFT_OUT = "..."
_BLOCK = re.compile(r"(?<=^```text\n)(?=\$ gckernels ).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_LAST_COLUMN = re.compile(r"^(.*) {2,}(\S+ \S+)$")


def page_with_outputs(path: Path) -> str:
    """The text of a page, with the outputs of today in its blocks."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return _BLOCK.sub(lambda block: _with_outputs(block.group()), path.read_text(encoding="utf-8"))


def _with_outputs(block: str) -> str:
    """The lines of a block, with the outputs of today."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    lines = []
    for command, shown in zip(parts[::2], parts[1::2], strict=True):
        output, kept = output_of(command), shown.splitlines()
        if kept[:1] == [LEFT_OUT]:
            output[: len(output) - len(kept) + 1] = [LEFT_OUT]
        lines += [f"$ {command}", *output]
    return "\n".join(lines) + "\n"


def output_of(command: str) -> list[str]:
    """The lines that a command line prints on stdout, without the times of searches."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = commands.main(shlex.split(command)[1:])
    assert code in (0, 1), command
    lines, in_table = printed.getvalue().splitlines(), False
    for number, line in enumerate(lines):
        in_table = line.endswith("found in") or (in_table and _LAST_COLUMN.match(line) is not None)
        if in_table and (found := _LAST_COLUMN.match(line)):
            last = found[2] if found[2] == "found in" else LEFT_OUT
            lines[number] = f"{found[1].rstrip()}  {last:>8}"
    return lines
