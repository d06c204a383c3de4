"""The command ``gckernels lab``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .namespaces import LinksError
from .network import links
from .rates import UNTHROTTLED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels lab`` to a parser."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    rate_help = f"rate of each link, such as 100mbit; {UNTHROTTLED} does not throttle (default: 1gbit)"
    parser.add_argument("--rate", default="1gbit", help=rate_help)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="program that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(given: argparse.Namespace) -> int:
    """Do what the command says, given the parsed arguments of :func:`add_arguments`; returns an exit status."""
    program = [*(["-m"] if given.module else []), given.script, *given.arguments]
    return run_in_links(given.ranks, [given.rate], program, name="gckernels lab")


def run_in_links(ranks: int, rates: Iterable[str], arguments: Sequence[str], name: str | None = None) -> int:
    """Run a program's ranks on links, one rate after another, up to the first failure; print which ranks failed.

    Args:
        ranks: number of ranks.
        rates: rates as in :func:`links`.
        arguments: arguments of the interpreter, as in :meth:`Links.run`.
        name: the name of this program in messages; the default is the name of its file.

    Returns:
        An exit status: 0 for success, 1 if a rank has failed, 2 if links cannot be created.
    """
    try:
        for rate in rates:
            with links(ranks, rate) as made:
                codes = made.run(*arguments)
            for rank, code in enumerate(codes):
                if code:
                    how = f"signal {-code}" if code < 0 else f"exit status {code}"
                    print(f"rank {rank} of {ranks} ended with {how} on links of rate {rate}", file=sys.stderr)
            if any(codes):
                return 1
    except (LinksError, ValueError) as error:
        print(f"{name or Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    return 0
