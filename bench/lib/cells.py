"""Measurements in cells: each cell gets links of its own and ends in rows of one CSV file, so a run can be resumed.

A measurement is a program that describes itself by a :class:`Measurement` and calls :func:`main`. The same program runs
in the ranks of every cell, where :func:`main` measures that cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.lib.changes import served
from bench.lib.cores import Stolen
from bench.lib.models import WORKLOADS
from bench.lib.program import program_parser, python_arguments
from bench.lib.record import csv_path, environment, merge_csv, read_csv
from bench.lib.rounds import CPU, markdown
from bench.lib.sizes import two_or_more
from gckernels.sync.lab import UNTHROTTLED, LinksError, Network, checked_rate, in_rank, links

CELL = "BENCH_CELL"  # environment variable with the cell that a rank measures
TIMEOUT = datetime.timedelta(minutes=5)  # for each collective
VERSIONS = ("device", "python", "torch", "triton")  # a row with other ones is measured again
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """The part of a measurement that one set of ranks measures.

    Attributes:
        network: ranks and links.
        columns: columns that all rows of the cell share, with their values.
        arms: values of the column ``arm``, one row for each.
    """

    network: Network
    columns: dict[str, str | int]
    arms: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.columns.items())


@dataclass(frozen=True)
class Measurement:
    """A measurement on links.

    Attributes:
        name: name of its CSV file.
        key: columns that identify a row.
        printed: columns that are printed when a cell has been measured.
        cells: returns the cells that the command line asks for.
        measure: called on every rank of a cell, with the process group initialised; returns a row for each arm, without
            the cell's columns. The rows of rank 0 are written.
    """

    name: str
    key: tuple[str, ...]
    printed: tuple[str, ...]
    cells: Callable[[argparse.Namespace], list[Cell]]
    measure: Callable[[argparse.Namespace, Cell], list[Row]]


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser of the options that all measurements have; ``rounds`` is the default number of rounds."""
    made = program_parser(description)
    made.add_argument("--rounds", type=two_or_more, default=rounds)
    made.add_argument(
        "--resume", action="store_true", help="skip what the file has already, with these versions and settings"
    )
    return made


def add_networks(parser: argparse.ArgumentParser, models: Sequence[str], known: Collection[str] = WORKLOADS) -> None:
    """Add the options for models, with their default, and for networks."""
    parser.add_argument("--models", nargs="+", choices=list(known), default=list(models))
    networks = parser.add_argument("--networks", nargs="+", type=checked_network, default=["2"], metavar="RANKS")
    networks.help = "2, or 2x2 for machines x ranks"


def add_grid(parser: argparse.ArgumentParser, models: Sequence[str], rates: Sequence[str], budget_s: int) -> None:
    """Add the options of :func:`grid`, with their defaults."""
    add_networks(parser, models)
    rate = parser.add_argument("--rates", nargs="+", type=checked_rate, default=list(rates))
    rate.help = 'of links between machines; "none" is no limit'
    parser.add_argument("--local-rate", type=checked_rate, default="10gbit", help="of links inside machines")
    parser.add_argument("--budget-s", type=int, default=budget_s, help="seconds for the rounds of the arms in memory")


def grid(args: argparse.Namespace, arms: Callable[[Network], Sequence[str]], **columns: str | int) -> list[Cell]:
    """A cell for each model, network and rate; ``columns`` are further ones that all cells share."""
    cells = []
    for model, network, rate in itertools.product(args.models, args.networks, args.rates):
        made = network_of(network, rate, args.local_rate)
        where = {"model": model, "network": network, "rate": rate, "local_rate": made.local_rate}
        where |= {"max_rounds": args.rounds, "budget_s": args.budget_s} | columns
        cells.append(Cell(made, where, tuple(dict.fromkeys(arms(made)))))
    return cells


def checked_network(text: str) -> str:
    """A number of ranks such as ``2``, or of machines and of ranks on each such as ``2x2``, in its shortest form.

    Raises:
        ArgumentTypeError: the text is anything else.
    """
    machines, _, ranks = text.partition("x")
    if not machines.isdecimal() or int(machines) < 2 or not (ranks or "1").isdecimal() or ranks == "0":
        raise argparse.ArgumentTypeError(f"must be written like 2 ranks or 2x2 machines and ranks, got {text!r}")
    return f"{int(machines)}x{int(ranks)}" if int(ranks or 1) > 1 else str(int(machines))


def network_of(text: str, rate: str, local_rate: str = UNTHROTTLED) -> Network:
    """The network of a :func:`checked_network`; ``local_rate`` is for links inside machines of several ranks."""
    machines, _, ranks = text.partition("x")
    if not ranks:
        return Network(int(machines), rate)
    return Network(int(machines) * int(ranks), rate, int(ranks), local_rate)


def main(measurement: Measurement, args: argparse.Namespace) -> int:
    """Measure all cells, or in a rank the rank's own; returns an exit status.

    A cell whose ranks fail does not keep the others from being measured, and makes the exit status 1. If links cannot
    be created, the exit status is 2.
    """
    if in_rank():
        _measure_own(measurement, args)
        return 0
    cells = measurement.cells(args)
    if args.resume:
        cells = unmeasured(cells, read_csv(csv_path(measurement.name, CPU)))
    failed = []
    for number, cell in enumerate(cells, 1):
        print(f"cell {number} of {len(cells)}: {cell}", flush=True)
        start_s = time.monotonic()
        try:
            codes = _run(cell)
        except LinksError as error:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            return 2
        if any(codes):
            failed.append(cell)
        print(f"cell {number} of {len(cells)}: {time.monotonic() - start_s:.0f} s", flush=True)
    for cell in failed:
        print(f"not measured: {cell}", file=sys.stderr)
    return 1 if failed else 0


def _run(cell: Cell) -> list[int]:
    """Run this program in the ranks of a cell; returns their exit codes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # rows do not say how many threads a rank has
    os.environ[CELL] = json.dumps(dataclasses.asdict(cell))
    with links(cell.network) as made, served(made):
        codes = made.run(*python_arguments(sys.argv[0]), *sys.argv[1:])
    for rank, code in enumerate(codes):
        if code:
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            print(f"rank {rank} ended with {how}", file=sys.stderr)
    return codes


def unmeasured(cells: Sequence[Cell], rows: Sequence[dict[str, str]]) -> list[Cell]:
    """The cells and arms for which ``rows`` has no row with the same columns and the versions of this process."""
    here = {name: value for name, value in environment(CPU).items() if name in VERSIONS}
    left = []
    for cell in cells:
        wanted = here | {name: str(value) for name, value in cell.columns.items()}
        found = {row.get("arm", "") for row in rows if wanted.items() <= row.items()}
        arms = tuple(arm for arm in cell.arms if arm not in found)
        if arms:
            left.append(dataclasses.replace(cell, arms=arms))
    return left


def _measure_own(measurement: Measurement, args: argparse.Namespace) -> None:
    """Measure the cell of this rank; rank 0 writes and prints its rows.

    Their column ``stolen`` is the part of the cores that a host of virtual machines gave to others meanwhile.
    """
    read = json.loads(os.environ[CELL])
    cell = Cell(Network(**read["network"]), read["columns"], tuple(read["arms"]))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    stolen = Stolen()
    rows = [cell.columns | row for row in measurement.measure(args, cell)]
    rows = [row | {"stolen": f"{stolen.part():.3f}"} for row in rows]
    if dist.get_rank() == 0 and rows:
        merge_csv(measurement.name, CPU, rows, measurement.key)
        print(f"\n{cell}\n\n{markdown(rows, measurement.printed)}\n", flush=True)
    dist.destroy_process_group()
