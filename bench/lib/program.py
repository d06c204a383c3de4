"""How Python is told to run a program of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]


def python_arguments(script: str) -> list[str]:
    """Arguments of the interpreter that run a script: ``-m`` and the module's name for a file of the checkout, whose
    imports begin at the root; the path for any other.

    Args:
        script: its path, as in ``sys.argv[0]``.
    """
    path = Path(script).absolute()
    if path.suffix == ".py" and path.is_relative_to(ROOT):
        names = path.relative_to(ROOT).with_suffix("").parts
        if all(map(str.isidentifier, names)):  # not what lies in .venv
            return ["-m", ".".join(names)]
    return [script]
