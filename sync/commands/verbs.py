"""The table of verbs, and what a module that implements one has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from .common.console import Console
from .common.outcome import Exit

VERBS: Mapping[str, str] = {
    "trace": "measure steps of a training script, for plans",
    "profile": "measure what collectives and compressors cost on the ranks of torchrun",
    "plan": "choose a plan for a model on a machine, and say whether it pays",
    "explain": "say why a plan takes as long as it does, and what its choices are worth",
    "predict": "say where compression pays, over bandwidths, machines, batch sizes and speeds of codecs",
    "lab": "run a script on throttled links between network namespaces",
    "compressors": "list the compressors with their defaults",
    "show": "print the functions that are generated for a quantiser",
}
"""The verbs and what each does, in the order of a new user's needs. ``sync/commands/VERB.py`` implements it."""


class Verb(Protocol):
    """A module that implements a verb. It is imported only if the verb is asked for."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments to the verb's parser, and set its description and epilogue."""

    def run(self, given: argparse.Namespace, console: Console) -> Exit:
        """Do what the arguments say.

        Raises:
            CommandError: something is refused; nothing has been written.
        """


OUTPUTS = ("output", "png", "perfetto")
"""The arguments of verbs that name files to write."""
INPUTS = ("trace", "machine", "plan", "against", "script")
"""The arguments that name files to read."""


def module_of(verb: str) -> Verb:
    """The module of a verb."""
    return cast(Verb, import_module(f".{verb}", __package__))


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which verbs with results have."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")


def add_output_argument(parser: argparse.ArgumentParser, content: str) -> None:
    """Add ``-o FILE``, which verbs that make a file have.

    Args:
        parser: the verb's parser.
        content: what the file has, such as ``"the plan"``.
    """
    help_ = f"write {content} to this file; - is stdout, and tables go to stderr then"
    parser.add_argument("-o", "--output", metavar="FILE", help=help_)
