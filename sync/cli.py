"""The ``gckernels`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gckernels

_REFERENCE_NUMEL = 2**20


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
    """One line per compressor at its default setting: payload bytes per element of a unit of 2**20, capabilities."""
    lines = [f"{'compressor':<60} {'bytes/element':>13}  {'feedback':<8}  summable"]
    for name in sorted(gckernels.COMPRESSORS):
        compressor = gckernels.from_spec(name)
        per_element = compressor.payload_nbytes(_REFERENCE_NUMEL) / _REFERENCE_NUMEL
        feedback = "yes" if compressor.needs_feedback else "no"
        summable = "yes" if compressor.summable else "no"
        lines.append(f"{compressor!s:<60} {per_element:>13.4f}  {feedback:<8}  {summable}")
    return "\n".join(lines)
