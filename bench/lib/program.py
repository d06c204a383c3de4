"""Command lines of the programs of this checkout: their parsers, and commands that run them."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]


def program_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of arguments whose help begins with the docstring of a program, in its own lines."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def found(tool: str, *places: str) -> str | None:
    """The path of a program that is on the path of this process, or one of ``places``; ``None`` if there is none."""
    return shutil.which(tool) or next((place for place in places if os.access(place, os.X_OK)), None)


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


def launch_ranks(ranks: int) -> int:
    """The exit status of ranks that run this command with its arguments, started like torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [*python_arguments(sys.argv[0]), *sys.argv[1:]]
    # one thread per rank: ranks that compete for cores are slower
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def heed_interrupts() -> None:
    """Let SIGINT end the program that this process is about to run; meant for ``preexec_fn`` of ``Popen``.

    A shell starts programs in the background such that they, and all that they start, ignore SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
