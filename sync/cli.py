"""The ``gckernels`` command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import gckernels

_REFERENCE_SHAPE = (1024, 1024)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``gckernels`` command and return its exit code.

    Args:
        arguments: the command line without the program's name; by default that of this process.
    """
    parser = argparse.ArgumentParser(prog="gckernels", description="Gradient compression for PyTorch.")
    parser.add_argument("--version", action="version", version=f"gckernels {gckernels.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compressors", help="list the compressors with their defaults")
    parser.parse_args(arguments)
    print(compressors_table())
    return 0


def compressors_table() -> str:
    """A table of all methods with their default settings, one line each.

    Its columns are the bytes per element that the method sends for a 1024 x 1024 matrix, whether it needs error
    feedback, and whether its payloads can be summed.
    """
    numel = math.prod(_REFERENCE_SHAPE)
    rows = [("compressor", "bytes/element", "feedback", "summable")]
    for name in sorted(gckernels.METHODS):
        method = gckernels.from_spec(name)
        fitted = method.fit(_REFERENCE_SHAPE)
        per_element = sum(fitted.round_nbytes(numel, index) for index in range(fitted.rounds)) / numel
        feedback = "yes" if method.traits.needs_feedback else "no"
        summable = "yes" if method.traits.summable else "no"
        rows.append((str(method), f"{per_element:.4f}", feedback, summable))
    first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{a:<{first}}  {b:>{second}}  {c:<{third}}  {d}" for a, b, c, d in rows)
