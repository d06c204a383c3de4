"""The ``gckernels`` command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import gckernels
from gckernels.toolkit.quantizer import MapQuantizer
from gckernels.toolkit.quantizer.generated import triton_source
from gckernels.toolkit.quantizer.host import c_source

from .lab import command as lab

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
    show = commands.add_parser("show", help="print the functions that are generated for a quantiser")
    show.add_argument("spec", help="a compressor, such as EFSignSGD or 'QSGD(levels=3)'")
    language = show.add_mutually_exclusive_group(required=True)
    language.add_argument("--triton", action="store_true", help="the functions that its kernels call")
    language.add_argument("--c", action="store_true", help="the functions of its host path")
    on_links = commands.add_parser(
        "lab",
        help="run a script on throttled links between network namespaces",
        description="Run any script that runs under torchrun on links of a known rate: every rank has a network "
        "namespace of its own. Needs root on Linux, and ip and tc (on Debian: apt-get install iproute2).",
    )
    lab.add_arguments(on_links)
    given = parser.parse_args(arguments)
    if given.command == "lab":
        return lab.run(given)
    if given.command == "compressors":
        print(compressors_table())
        return 0
    try:
        print(generated_source(gckernels.from_spec(given.spec), triton=given.triton), end="")
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return 0


def generated_source(method: gckernels.Method, *, triton: bool) -> str:
    """The functions that are generated for a quantiser, in Triton or in C.

    Raises:
        ValueError: ``method`` is no quantiser.
        TypeError: one of its functions has no form in that language.
    """
    if not isinstance(method, MapQuantizer):
        raise ValueError(f"{method.name} has no generated functions: its kernels and its host path are written by hand")
    return triton_source(method) if triton else c_source(method)


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
