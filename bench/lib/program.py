"""Command lines that run programs of this checkout."""

from __future__ import annotations

import signal
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]


def python_arguments(script: str) -> list[str]:
    """The interpreter's arguments that run ``script``, a path as in ``sys.argv[0]``.

    They are ``-m`` and the module's name for a file of the checkout, whose imports start at the root, and the path for
    any other file.
    """
    path = Path(script).absolute()
    if path.suffix == ".py" and path.is_relative_to(ROOT):
        names = path.relative_to(ROOT).with_suffix("").parts
        if all(map(str.isidentifier, names)):  # excludes files in .venv
            return ["-m", ".".join(names)]
    return [script]


def heed_interrupts() -> None:
    """Let SIGINT end the program that this process is about to run; meant for ``preexec_fn`` of ``Popen``.

    A shell starts programs in the background such that they, and all that they start, ignore SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
