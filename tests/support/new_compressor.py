"""The code in ``docs/tutorials/new_compressor.md``, and commands that can import its compressor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "tutorials" / "new_compressor.md").read_text()
COMPRESSOR, _ = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def written(folder: Path) -> Path:
    """Write the document's compressor as a module into ``folder``; Triton reads the source of kernels from files."""
    path = folder / "laplace3.py"
    path.write_text(COMPRESSOR)
    return path


def run(folder: Path, *command: str) -> str:
    """The output of Python with the arguments ``command``, which can import modules in ``folder``."""
    paths = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout
