"""Exchanges in trains on links of a known rate: the package's own against Gloo's, and both against the link.

    python -m bench.sync.trains
    python -m bench.sync.trains --rates 100mbit --world-sizes 4 --nbytes 1Mi

Messages of a training step follow each other without a pause, so collectives are measured in trains of eight, and alone
for comparison (``sync/lab``, needs root). In a train two exchanges are on their way, as on a lane of the engine. The
arms take turns within one process: Gloo's collective, one after the other; the same again, which shows the noise floor;
Gloo's with two on their way; every way of :mod:`gckernels.sync.messages.exchanges`; and the way that the package
chooses. The slowest rank counts. Rows of ``bench/results/cpu/trains.csv`` have medians over the rounds, quartiles of
the ratios to Gloo's in the same round, and the ratio to the time that the link needs for the bytes of a rank, at the
goodput that plain sockets reach in the same cell.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from bench.lib import cells
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.goodput import goodput
from bench.lib.rounds import CPU, ratio_columns, slowest, take_turns
from bench.lib.sizes import parse_numel, two_or_more
from gckernels.sync import Topology
from gckernels.sync.communication.collectives import all_gather
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.communication.links import RankConnections
from gckernels.sync.lab import Network, checked_rate
from gckernels.sync.messages import exchanges
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.lanes import IN_FLIGHT
from gckernels.sync.programs.rules import Site
from gckernels.sync.resources.memory_spaces import Places
from gckernels.sync.resources.stage import Issue, Wait

KEY = ("rate", "world_size", "collective", "nbytes", "arm")
PRINTED = ("arm", "train_s", "ratio_to_gloo", "ratio_quartile_1", "ratio_quartile_3", "alone_s", "train_over_wire")
ROUNDS, WARM_UP, TRAIN = 11, 1, 8
GLOO, AGAIN, GLOO_IN_FLIGHT = "Gloo", "Gloo, again", "Gloo, two in flight"
AT_ONCE, AROUND, CHOSEN = "at once", "around", "chosen"


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    rates = ["100mbit", "1gbit"]
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=rates, help='"none" does not throttle')
    parser.add_argument("--world-sizes", nargs="+", type=two_or_more, default=[2, 3, 4, 8])
    parser.add_argument("--collectives", nargs="+", choices=list(ARMS), default=list(ARMS))
    sizes = [2**16, 2**18, 2**20]
    parser.add_argument("--nbytes", nargs="+", type=parse_numel, default=sizes, help="of a rank's payloads, like 256Ki")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each rate, number of ranks, collective and size."""
    return [
        Cell(
            Network(ranks, rate),
            {"rate": rate, "world_size": ranks, "collective": name, "nbytes": nbytes, "rounds": args.rounds},
            ARMS[name],
        )
        for rate, ranks, nbytes, name in itertools.product(args.rates, args.world_sizes, args.nbytes, args.collectives)
    ]


# -------------------------------------------------------------------- in each rank


def gather_arms(link: RankConnections, nbytes: int) -> dict[str, Issue]:
    """All-gathers of ``nbytes`` bytes of each rank, by arm."""
    row, received = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(link.ranks, nbytes, dtype=torch.uint8)
    rows = list(received)
    return {
        GLOO_IN_FLIGHT: lambda: all_gather(received.view(-1), row, group=link.group, async_op=True).wait,
        AT_ONCE: functools.partial(exchanges.send_at_once, link, [row] * link.ranks, rows),
        AROUND: functools.partial(exchanges.send_around, link, rows),
        CHOSEN: exchanges.bind_all_gather(link, row, received),
    }


def all_to_all_arms(link: RankConnections, nbytes: int) -> dict[str, Issue]:
    """All-to-alls of ``nbytes`` bytes of each rank, by arm."""
    sent, received = torch.zeros(2, link.ranks, nbytes // link.ranks, dtype=torch.uint8)

    def gloo() -> Wait:
        work: Any = dist.all_to_all_single(received.view(-1), sent.view(-1), group=link.group, async_op=True)
        return work.wait

    return {GLOO_IN_FLIGHT: gloo, CHOSEN: exchanges.bind_all_to_all(link, sent, received)}


def hop_arms(link: RankConnections, nbytes: int) -> dict[str, Issue]:
    """Hops around a ring with the ``nbytes`` bytes of each rank, by arm."""
    sent, received = torch.zeros(2, nbytes, dtype=torch.uint8)

    def gloo() -> Wait:
        calls = [
            dist.P2POp(dist.isend, sent, group=link.group, group_peer=(link.index + 1) % link.ranks),
            dist.P2POp(dist.irecv, received, group=link.group, group_peer=(link.index - 1) % link.ranks),
        ]
        return functools.partial(exchanges.wait_for, dist.batch_isend_irecv(calls))

    return {GLOO_IN_FLIGHT: gloo, CHOSEN: exchanges.bind_hop(link, sent, received)}


MAKE = {"all-gather": gather_arms, "all-to-all": all_to_all_arms, "hop": hop_arms}
ARMS: dict[str, tuple[str, ...]] = {
    "all-gather": (GLOO, AGAIN, GLOO_IN_FLIGHT, AT_ONCE, AROUND, CHOSEN),
    "all-to-all": (GLOO, AGAIN, GLOO_IN_FLIGHT, CHOSEN),
    "hop": (GLOO, AGAIN, GLOO_IN_FLIGHT, CHOSEN),
}


def sent_nbytes(name: str, nbytes: int, ranks: int) -> int:
    """The bytes that every rank sends in a collective."""
    match name:
        case "all-gather":
            return (ranks - 1) * nbytes
        case "all-to-all":
            return (ranks - 1) * (nbytes // ranks)
    return nbytes


def train(exchange: Issue, in_flight: int) -> tuple[float, float]:
    """The seconds of a collective alone, and of each in a train."""
    start = time.perf_counter()
    exchange()()
    alone = time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    waits: deque[Wait] = deque()
    for _ in range(TRAIN):
        if len(waits) == in_flight:
            waits.popleft()()
        waits.append(exchange())
    for wait in waits:
        wait()
    return alone, (time.perf_counter() - start) / TRAIN


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure all arms of a collective; returns their rows."""
    name, nbytes, ranks = str(cell.columns["collective"]), int(cell.columns["nbytes"]), cell.network.ranks
    site = Site(0, Level.FLAT, Place.DEVICE, exchanges=True)
    assert dist.group.WORLD is not None
    communicators = Communicators(dist.group.WORLD, Places.of(CPU), Topology(ranks), [site])
    made = MAKE[name](communicators.link(0), nbytes)
    arms = {arm: functools.partial(train, made[GLOO_IN_FLIGHT], 1) for arm in (GLOO, AGAIN)}
    arms |= {arm: functools.partial(train, exchange, IN_FLIGHT) for arm, exchange in made.items()}
    goodput_nbytes_per_s = goodput()
    results = take_turns(arms, args.rounds, WARM_UP)
    wire_s = sent_nbytes(name, nbytes, ranks) / goodput_nbytes_per_s
    rows: list[Row] = []
    seconds = {arm: slowest(each).T.tolist() for arm, each in results.items()}  # alone, in trains
    for arm in cell.arms:
        alone, in_trains = seconds[arm]
        row: Row = {"arm": arm, "train_s": f"{statistics.median(in_trains):.6f}"}
        row |= ratio_columns(in_trains, seconds[GLOO][1], "ratio_to_gloo")
        row |= {"alone_s": f"{statistics.median(alone):.6f}", "wire_s": f"{wire_s:.6f}"}
        row["train_over_wire"] = f"{statistics.median(in_trains) / wire_s:.3f}"
        row["goodput_nbytes_per_s"] = f"{goodput_nbytes_per_s:.0f}"
        rows.append(row)
    communicators.close()
    return rows


def main() -> int:
    return cells.main(Measurement("trains", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
