"""New Python processes whose output is tested, such as those in which Triton compiles kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(
    *arguments: str | Path,
    paths: Iterable[Path] = (),
    interprets: bool = False,
    timeout_s: float | None = None,
    **more: str,
) -> str:
    """The standard output of Python with these arguments, run in the checkout; fails unless it exits with 0.

    Args:
        arguments: a script, or an option such as ``-c``, and its arguments.
        paths: folders from which the process can import, besides the checkout.
        interprets: whether Triton interprets kernels there instead of compiling them.
        timeout_s: seconds that it may take.
        more: variables of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = (*paths, ROOT, environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in folders if folder)
    if interprets:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *map(str, arguments)]
    finished = subprocess.run(
        command, cwd=ROOT, env=environment | more, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout
