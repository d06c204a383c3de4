"""The start of the command: finds the verb, parses its arguments, runs it, and turns every error into one line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import gckernels

from .common.console import Console
from .common.files import STANDARD, check_outputs
from .common.outcome import CommandError, Exit, wrong_use
from .verbs import INPUTS, OUTPUTS, VERBS, Verb, module_of

SHOWS_TRACEBACK = "GCKERNELS_TRACEBACK"
_EXIT_CODES = "exit codes: 0 done, and it pays; 1 it does not pay; 2 wrong use; 3 data that is not good enough"


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
        implementation = module_of(verb) if verb in VERBS else None
        given = _parser(verb, implementation).parse_args(words, argparse.Namespace(words=words))
        assert implementation is not None
        outputs, inputs = (_paths(given, names) for names in (OUTPUTS, INPUTS))
        console = Console(verb, getattr(given, "json", False), STANDARD in outputs)
        check_outputs(outputs, inputs)
        code = implementation.run(given, console)
        console.close()
        return code
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


def _paths(given: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The values of those arguments that the verb has and that are given."""
    values = (getattr(given, name, None) for name in names)
    return [value for value in values if value is not None]


def _refuse(console: Console, line: str, code: int) -> int:
    console.close()
    if console.speaks:
        print(line, file=sys.stderr)
    return code


def _parser(verb: str, implementation: Verb | None) -> Parser:
    """The parser of the command line, with the arguments of one verb."""
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
        if name == verb and implementation is not None:
            implementation.add_arguments(one)
    return parser
