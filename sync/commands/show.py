"""The verb ``show``: the functions that are generated for a quantiser."""

from __future__ import annotations

import argparse

import gckernels
from gckernels.toolkit.quantizer import MapQuantizer
from gckernels.toolkit.quantizer.generated import triton_source
from gckernels.toolkit.quantizer.host import c_source

from .common.console import Console
from .common.files import add_outputs
from .common.outcome import Outcome, wrong_use


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels show``."""
    parser.add_argument("spec", help="a compressor, such as EFSignSGD or 'QSGD(levels=3)'")
    language = parser.add_mutually_exclusive_group(required=True)
    language.add_argument("--triton", action="store_true", help="the functions that its kernels call")
    language.add_argument("--c", action="store_true", help="the functions of its host path")
    add_outputs(parser)


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Generate the functions."""
    try:
        text = generated_source(gckernels.from_spec(given.spec), triton=given.triton)
    except (TypeError, ValueError) as error:
        raise wrong_use(error, "gckernels compressors lists all compressors") from None
    record = {"compressor": given.spec, "language": "triton" if given.triton else "c", "source": text}
    return Outcome(text.removesuffix("\n"), record)


def generated_source(method: gckernels.Compressor, *, triton: bool) -> str:
    """The functions that are generated for a quantiser, in Triton or in C.

    Raises:
        ValueError: ``method`` is no quantiser.
        TypeError: one of its functions has no form in that language.
    """
    if not isinstance(method, MapQuantizer):
        raise ValueError(f"{method.name} has no generated functions: its kernels and its host path are written by hand")
    return triton_source(method) if triton else c_source(method)
