"""Orders of work on streams, each taken out of the package in turn: a test on the simulated device must find it.

python tests/support/mutants.py [NAME ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
_PARTS = ("gckernels", "sync", "planner", "harness", "tests", "conftest.py", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """The package without one order.

    Attributes:
        path: the file.
        order: its text, once in the file.
        without: the text in its place.
        found_by: the test that finds it.
        late: the seed of the delays, if the order is one of the host, which clocks do not see; else ``None``.
    """

    path: str
    order: str
    without: str
    found_by: str
    late: int | None = None


MUTANTS: dict[str, Mutant] = {}


def tried(mutant: Mutant) -> tuple[bool, str]:
    """Whether the test fails for a mutant, and what it has printed."""
    with tempfile.TemporaryDirectory() as folder:
        for part in _PARTS:
            source = _CHECKOUT / part
            if source.is_dir():
                shutil.copytree(source, Path(folder, part), symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder)
        os.symlink(_CHECKOUT / "build", Path(folder, "build"))
        mutated = Path(folder, mutant.path)
        text = mutated.read_text()
        assert text.count(mutant.order) == 1, f"{mutant.path} has {mutant.order!r} {text.count(mutant.order)} times"
        mutated.write_text(text.replace(mutant.order, mutant.without))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider"]
        late = [] if mutant.late is None else ["--late", str(mutant.late)]
        ran = subprocess.run(
            [*command, *late, *mutant.found_by.split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        return ran.returncode == 1, ran.stdout


if __name__ == "__main__":
    for name in sys.argv[1:] or MUTANTS:
        is_found, _ = tried(MUTANTS[name])
        print(f"{name}: {'found' if is_found else 'NOT FOUND'} by {MUTANTS[name].found_by}", flush=True)
