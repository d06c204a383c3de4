"""The command: finds the verb, parses its arguments, runs it, writes and prints its results, and turns every error into
one line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol, TextIO

import gckernels

from .common.console import Console
from .common.files import STANDARD, check_paths, write
from .common.outcome import CommandError, Exit, Outcome, wrong_use

SHOWS_TRACEBACK = "GCKERNELS_TRACEBACK"
VERBS: Mapping[str, str] = {
    "advise": "measure in a training script what each way of averaging takes, and say which line to add",
    "trace": "measure steps of a training script, for plans",
    "profile": "measure what collectives and compressors cost on the ranks of torchrun",
    "plan": "choose a plan for a model on a machine, and say whether it pays, here and elsewhere",
    "explain": "say why a plan takes as long as it does, and what its choices are worth",
    "lab": "run a script on throttled links between network namespaces",
    "patches": "write what changed between two checkpoints, without loss, or serve versions of weights",
    "compressors": "list the compressors with their defaults, or print the functions that are generated for one",
}
"""The verbs and what each does, in the order of a new user's needs. ``planner/commands/VERB.py`` implements it."""
_EXIT_CODES = "exit codes: 0 done, and it pays; 1 it does not pay; 2 wrong use; 3 data that is not good enough"


class Verb(Protocol):
    """A module that implements a verb. It is imported only if the verb is asked for."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments to the verb's parser, and set its description and epilogue."""

    def run(self, given: argparse.Namespace, console: Console) -> Outcome:
        """Do what the arguments say.

        Raises:
            CommandError: something is refused.
        """


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the command."""

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`~.outcome.CommandError` with the command that prints help."""
        raise wrong_use(message, f"{self.prog} --help lists the arguments")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``gckernels`` command and return its exit code (:class:`~.outcome.Exit`).

    Args:
        arguments: the command line without the program's name; by default that of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((word for word in words if not word.startswith("-")), "")
    name = f" {verb}" if verb in VERBS else ""
    console = Console(verb)
    try:
        given = parser_of(verb).parse_args(words, argparse.Namespace(words=words))
        outputs = check_paths(given)
        outcome = module_of(verb).run(given, console)
        _deliver(outcome, console, getattr(given, "json", False), sys.stderr if STANDARD in outputs else sys.stdout)
        return outcome.code
    except CommandError as error:
        return _refuse(console, f"gckernels{name}: {error}", error.code)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except KeyboardInterrupt:
        return _refuse(console, f"gckernels{name}: interrupted", 130)
    except Exception as error:
        if os.environ.get(SHOWS_TRACEBACK):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        line = f"gckernels{name}: this is a bug: {what} ({where}); {SHOWS_TRACEBACK}=1 shows where it comes from"
        print(line, file=sys.stderr)  # from all ranks: it may have happened on one only
        return Exit.BUG


def _deliver(outcome: Outcome, console: Console, as_json: bool, stream: TextIO) -> None:
    """Write the files of an outcome, and print its results, from rank 0."""
    if not console.speaks:
        return
    console.clear_bar()
    for path, content in outcome.files.items():
        if path is not None:
            write(path, content)
            if path != STANDARD:
                console.note(f"{path} is written")
    if as_json:
        print(json.dumps(outcome.record, indent=1, allow_nan=False), file=stream)
    elif outcome.text:
        print(outcome.text, file=stream)
    sys.stdout.flush()
    for line in outcome.notes:
        console.note(line)


def _refuse(console: Console, line: str, code: int) -> int:
    if console.speaks:
        console.clear_bar()
        print(line, file=sys.stderr)
    return code


def module_of(verb: str) -> Verb:
    """The module of a verb."""
    match verb:
        case "advise":
            from . import advise

            return advise
        case "trace":
            from . import trace

            return trace
        case "profile":
            from . import profile

            return profile
        case "plan":
            from . import plan

            return plan
        case "explain":
            from . import explain

            return explain
        case "lab":
            from . import lab

            return lab
        case "patches":
            from . import patches

            return patches
        case "compressors":
            from . import compressors

            return compressors
    raise ValueError(f"verb: must be {', '.join(VERBS)}, got {verb!r}")


def parser_of(verb: str) -> Parser:
    """The parser of the command line, with the arguments of one verb, if that exists."""
    verbs = "\n".join(f"  {name:<{max(map(len, VERBS))}}  {summary}" for name, summary in VERBS.items())
    parser = Parser(
        prog="gckernels",
        usage="gckernels VERB ...",
        description="Gradient compression for PyTorch.",
        epilog=f"verbs (gckernels VERB --help has the arguments of each):\n{verbs}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gckernels {gckernels.__version__}")
    added = parser.add_subparsers(dest="verb", metavar="VERB", required=True, prog="gckernels", help=argparse.SUPPRESS)
    for name, summary in VERBS.items():
        one = added.add_parser(name, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == verb:
            module_of(name).add_arguments(one)
    return parser
