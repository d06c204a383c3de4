"""The verb ``compressors``: a table of compressors, and the functions that are generated for one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gckernels
from gckernels.toolkit.quantizer import MapQuantizer
from gckernels.toolkit.quantizer.generated import triton_source
from gckernels.toolkit.quantizer.host import c_source

from .common.console import Console
from .common.files import add_outputs
from .common.outcome import Outcome, Part, wrong_use
from .common.tables import table

_REFERENCE_SHAPE = (1024, 1024)
_ALL = "gckernels compressors lists all compressors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels compressors``."""
    parser.description = (
        "List the compressors with their defaults, or one compressor: the bytes per element that each sends for a "
        "1024 x 1024 matrix, whether it needs error feedback, and whether its payloads can be summed. Or print the "
        "functions that are generated for a quantiser."
    )
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="a compressor, such as EFSignSGD or 'QSGD(levels=3)'")
    language = parser.add_mutually_exclusive_group()
    language.add_argument("--triton", action="store_true", help="print the functions that its kernels call")
    language.add_argument("--c", action="store_true", help="print the functions of its host path")
    add_outputs(parser)


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Make the table, or generate the functions."""
    if given.spec is None:
        if given.triton or given.c:
            raise wrong_use("--triton and --c print the functions of a compressor, and none is named", _ALL)
        records = [record_of(gckernels.from_spec(name)) for name in sorted(gckernels.COMPRESSORS)]
        return Outcome([compressors_part(records)])
    try:
        method = gckernels.from_spec(given.spec)
        if given.triton or given.c:
            if not isinstance(method, MapQuantizer):
                by_hand = "its kernels and its host path are written by hand"
                raise wrong_use(f"{method.name} has no generated functions: {by_hand}", _ALL)
            text = triton_source(method) if given.triton else c_source(method)
            record = {"compressor": given.spec, "language": "triton" if given.triton else "c", "source": text}
            return Outcome([Part(text.removesuffix("\n"), record)])
    except (TypeError, ValueError) as error:
        raise wrong_use(error, _ALL) from None
    return Outcome([compressors_part([record_of(method)])])


def record_of(method: gckernels.Compressor) -> dict[str, Any]:
    """The row of a compressor, as JSON values."""
    numel, fitted, traits = math.prod(_REFERENCE_SHAPE), method.fit(_REFERENCE_SHAPE), method.traits
    nbytes = sum(fitted.round_nbytes(numel, index) for index in range(fitted.rounds))
    record = {"compressor": str(method), "nbytes_per_element": nbytes / numel}
    return record | {"needs_feedback": traits.needs_feedback, "summable": traits.summable}


def compressors_part(records: Sequence[Mapping[str, Any]]) -> Part:
    """A table of compressors, one line each."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "compressor": lambda each: each["compressor"],
        "bytes/element": lambda each: f"{each['nbytes_per_element']:.4f}",
        "feedback": lambda each: "yes" if each["needs_feedback"] else "no",
        "summable": lambda each: "yes" if each["summable"] else "no",
    }
    return Part(table(records, columns, left=(0, 2, 3)), records)
