"""The command ``gckernels lab``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from .cluster import links
from .namespaces import LinksError
from .network import Network
from .rates import UNTHROTTLED
from .schedule import Event, place_from_text, seconds

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels lab`` to a parser."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--ranks", type=int, help="number of ranks (default: 2)")
    size.add_argument("--machines", type=int, help="number of machines, instead of the number of ranks")
    parser.add_argument("--ranks-per-machine", type=int, default=1, metavar="RANKS", help="default: 1")
    rate_help = f"rate of each machine's link, such as 100mbit; {UNTHROTTLED} does not throttle (default: 1gbit)"
    parser.add_argument("--rate", default="1gbit", help=rate_help)
    local_help = f"rate of the link of each rank to the other ranks of its machine (default: {UNTHROTTLED})"
    parser.add_argument("--local-rate", default=UNTHROTTLED, metavar="RATE", help=local_help)
    parser.add_argument(
        "--rate-of",
        action="append",
        default=[],
        metavar="LINK=RATE",
        help="rate of a single link, named by its rank or machine: 1=10mbit, machine0=10mbit; can be repeated",
    )
    delay_help = "time that packets between machines take in one direction, such as 1ms (default: 0s)"
    parser.add_argument("--delay", type=_argument(seconds), default=0.0, metavar="TIME", help=delay_help)
    parser.add_argument(
        "--at",
        action="append",
        type=_argument(Event.from_text),
        default=[],
        metavar="EVENT",
        help='change of a link some time after the start: "5s cut 1", "10s restore 1", "20s throttle machine0 10mbit"; '
        "can be repeated",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="program that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(given: argparse.Namespace) -> int:
    """Do what the command says, given the parsed arguments of :func:`add_arguments`; returns an exit status."""
    name = "gckernels lab"
    program = [*(["-m"] if given.module else []), given.script, *given.arguments]
    ranks = (given.ranks or 2) if given.machines is None else given.machines * given.ranks_per_machine
    try:
        rate_of = dict(_link_and_rate(text) for text in given.rate_of)
        network = Network(ranks, given.rate, given.ranks_per_machine, given.local_rate, given.delay, rate_of)
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return run_in_links(network, program, given.at, name)


def run_in_links(
    network: Network, arguments: Sequence[str], schedule: Sequence[Event] = (), name: str | None = None
) -> int:
    """Run a program on a network, and print which ranks failed.

    Args:
        network: the description of the network.
        arguments: arguments of the interpreter, as in :meth:`Links.run`.
        schedule: changes of links while the ranks run.
        name: the name of this program in messages; the default is the name of its file.

    Returns:
        An exit status: 0 for success, 1 if a rank has failed, 2 if links cannot be created.
    """
    name = name or Path(sys.argv[0]).name
    try:
        with links(network) as made:
            codes = made.run(*arguments, schedule=schedule, announce=lambda event: _tell(f"{name}: {event}"))
    except (LinksError, ValueError) as error:
        _tell(f"{name}: {error}")
        return 2
    for rank, code in enumerate(codes):
        if code:
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            _tell(f"rank {rank} of {network.ranks} ended with {how} on links of rate {network.rate}")
    return 1 if any(codes) else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _link_and_rate(text: str) -> tuple[int | str, str]:
    place, equals, rate = text.partition("=")
    if not equals:
        raise ValueError(f"--rate-of must be written like 1=10mbit or machine0=10mbit, got {text!r}")
    return place_from_text(place), rate


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type of arguments for ``argparse``, which shows its users the message of one exception alone."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
