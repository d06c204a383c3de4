"""The verb ``compressors``: a table of all compressors."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gckernels

from .common.console import Console
from .common.files import add_outputs
from .common.outcome import Outcome
from .common.tables import table

_REFERENCE_SHAPE = (1024, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels compressors``."""
    parser.description = (
        "List the compressors with their defaults: the bytes per element that each sends for a 1024 x 1024 matrix, "
        "whether it needs error feedback, and whether its payloads can be summed."
    )
    add_outputs(parser)


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Make the table."""
    records = compressors()
    return Outcome(compressors_table(records), records)


def compressors() -> list[dict[str, Any]]:
    """All methods with their default settings, as records of JSON values."""
    numel = math.prod(_REFERENCE_SHAPE)
    records = []
    for name in sorted(gckernels.COMPRESSORS):
        method = gckernels.from_spec(name)
        fitted = method.fit(_REFERENCE_SHAPE)
        nbytes = sum(fitted.round_nbytes(numel, index) for index in range(fitted.rounds))
        traits = method.traits
        record = {"compressor": str(method), "nbytes_per_element": nbytes / numel}
        records.append(record | {"needs_feedback": traits.needs_feedback, "summable": traits.summable})
    return records


def compressors_table(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of methods, one line each."""
    rows = [
        (
            each["compressor"],
            f"{each['nbytes_per_element']:.4f}",
            "yes" if each["needs_feedback"] else "no",
            "yes" if each["summable"] else "no",
        )
        for each in records
    ]
    return table(("compressor", "bytes/element", "feedback", "summable"), rows, left=(0, 2, 3))
