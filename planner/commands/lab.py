"""The verb ``lab``: a script on throttled links between network namespaces."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from gckernels.sync.lab import UNTHROTTLED, Event, LinksError, Network, enter_own_namespaces, links
from gckernels.sync.lab.network import place_from_text, seconds

from .common.console import Console
from .common.outcome import Exit, Outcome, wrong_use

T = TypeVar("T")

_AS_ROOT = 'sudo "$(command -v gckernels)" lab ..., because sudo may look for commands in other folders'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels lab``."""
    parser.description = (
        "Run any script that runs under torchrun on links of a known rate: every rank has a network namespace of its "
        "own. Needs Linux, and ip and tc (on Debian: apt-get install iproute2). Without root it runs in a user "
        "namespace, if the system allows that."
    )
    parser.epilog = "The exit code is 0 for success, 1 if a rank has failed, 2 for wrong use."
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


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Run the program of parsed arguments on its network, and note which ranks failed.

    Raises:
        CommandError: the arguments are wrong, or links cannot be created.
    """
    program = [*(["-m"] if given.module else []), given.script, *given.arguments]
    try:
        network = _network(given)
        if (why := enter_own_namespaces(["-m", "gckernels", *given.words])) is not None:
            raise wrong_use(why, _AS_ROOT)
        with links(network) as made:
            codes = made.run(*program, schedule=given.at, announce=console.note)
    except (ValueError, LinksError) as error:
        raise wrong_use(error) from None
    ends = {rank: f"signal {-code}" if code < 0 else f"exit status {code}" for rank, code in enumerate(codes) if code}
    notes = [f"rank {rank} of {network.ranks} ended with {ended}" for rank, ended in ends.items()]
    return Outcome(notes=notes, code=Exit.DOES_NOT_PAY if ends else Exit.OK)


def _network(given: argparse.Namespace) -> Network:
    ranks = 2 if given.ranks is None else given.ranks
    if given.machines is not None:
        ranks = given.machines * given.ranks_per_machine
    rate_of = dict(map(_link_and_rate, given.rate_of))
    return Network(ranks, given.rate, given.ranks_per_machine, given.local_rate, given.delay, rate_of)


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
