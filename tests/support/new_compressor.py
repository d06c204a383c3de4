"""The code in ``docs/tutorials/new_compressor.md``, and commands that can import its compressor."""

from __future__ import annotations

import re
from pathlib import Path

from processes import ROOT, output_of

DOCUMENT = (ROOT / "docs" / "tutorials" / "new_compressor.md").read_text()
COMPRESSOR, _ = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def written(folder: Path) -> Path:
    """Write the document's compressor as a module into ``folder``; Triton reads the source of kernels from files."""
    path = folder / "laplace3.py"
    path.write_text(COMPRESSOR)
    return path


def run(folder: Path, *command: str) -> str:
    """The output of Python with the arguments ``command``, which can import modules in ``folder``."""
    return output_of(*command, paths=[folder], interprets=True)
