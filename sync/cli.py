"""The ``gckernels`` command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import gckernels

_REFERENCE_SHAPE = (1024, 1024)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gckernels", description="Gradient compression for PyTorch.")
    parser.add_argument("--version", action="version", version=f"gckernels {gckernels.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compressors", help="list the compressors with their defaults")
    parser.parse_args(arguments)
    print(compressors_table())
    return 0


def compressors_table() -> str:
    """One line per method at its default setting: bytes per element that it sends of a matrix of 1024 x 1024 (one-shot
    codecs: of any unit of as many elements), capabilities."""
    numel = math.prod(_REFERENCE_SHAPE)
    rows = [("compressor", "bytes/element", "feedback", "summable")]
    for name in sorted(gckernels.METHODS):
        method = gckernels.from_spec(name)
        fitted = method.fit(_REFERENCE_SHAPE)
        per_element = sum(fitted.round_nbytes(numel, index) for index in range(fitted.rounds)) / numel
        feedback = "yes" if method.needs_feedback else "no"
        summable = "yes" if method.summable else "no"
        rows.append((str(method), f"{per_element:.4f}", feedback, summable))
    first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{a:<{first}}  {b:>{second}}  {c:<{third}}  {d}" for a, b, c, d in rows)
