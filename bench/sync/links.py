"""Measure the links themselves: round trips, goodput, and the cost of delaying packets.

    python -m bench.sync.links
    python -m bench.sync.links --rates 100mbit --delays 0s 1ms

Every rate and delay gets a separate network of two ranks (``sync/lab``, needs root). Rank 0 sends packets of one byte,
which rank 1 returns, and then as much as a TCP connection takes in a few seconds. Then both ranks reduce vectors over
Gloo, one after the other, as large as these seconds allow. Rows of ``bench/results/cpu/links.csv`` have median and 90th
percentile of the round trips in microseconds, the goodput in Mbit/s, the share of a core that the switch which delays
packets takes during the transfer, and what a rank sends during an all-reduce, in Mbit/s: the median, the least and the
largest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.lib import cells
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import switch_pid
from gckernels.sync.lab import UNTHROTTLED, Network, checked_rate
from gckernels.sync.lab.network import seconds

KEY = ("rate", "delay_s")
PRINTED = ("round_trip_us", "goodput_mbit_per_s", "switch_cores", "allreduce_median_mbit_per_s")
PORT, TRIPS, TRANSFER_S, PART_NBYTES = 9000, 500, 3.0, 2**20
CALLS, LARGEST_NBYTES = 12, 2**26


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, CALLS)
    rates = ["10mbit", "100mbit", "1gbit", UNTHROTTLED]
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=rates)
    parser.add_argument("--delays", nargs="+", type=seconds, default=[0.0, 0.0001, 0.001, 0.01])
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each rate and delay."""
    return [
        Cell(Network(2, rate, delay_s=delay_s), {"rate": rate, "delay_s": f"{delay_s:g}"}, ("",))
        for rate, delay_s in itertools.product(args.rates, args.delays)
    ]


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the links of a network; returns the row."""
    row: Row = {}
    if dist.get_rank() == 0:
        row = send(cell.network.address(1))
    else:
        receive()
    return [row | reduce(row.get("goodput_mbit_per_s", 0.0), args.rounds)]


def send(receiver: str) -> dict[str, float]:
    """Measure round trips, then the goodput; runs in rank 0."""
    trips: list[float] = []
    switch = switch_pid()
    with _connected(receiver) as connection:
        for _ in range(TRIPS):
            start_s = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            trips.append(1e6 * (time.perf_counter() - start_s))
        part, nbytes, start_s = bytes(PART_NBYTES), 0, time.perf_counter()
        cpu_s = _cpu_s(switch)
        while time.perf_counter() < start_s + TRANSFER_S:
            connection.sendall(part)
            nbytes += PART_NBYTES
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # everything has arrived
        elapsed_s = time.perf_counter() - start_s
        share = (_cpu_s(switch) - cpu_s) / elapsed_s
    percentile_90 = statistics.quantiles(trips, n=10)[-1]
    return {
        "round_trip_us": round(statistics.median(trips), 1),
        "round_trip_90_us": round(percentile_90, 1),
        "goodput_mbit_per_s": round(8e-6 * nbytes / elapsed_s, 1),
        "switch_cores": round(share, 3),
    }


def receive() -> None:
    """Return single bytes, then take everything; runs in rank 1."""
    with socket.create_server(("", PORT)) as listener:
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(TRIPS):
            connection.sendall(connection.recv(1))
        buffer = bytearray(PART_NBYTES)
        while connection.recv_into(buffer):
            pass
        connection.sendall(b"x")


def reduce(goodput_mbit_per_s: float, calls: int) -> dict[str, float]:
    """Measure all-reduces of as many bytes as the links take in the seconds of a transfer; collective."""
    goodput = torch.tensor(goodput_mbit_per_s)
    dist.broadcast(goodput, 0)
    nbytes = min(int(goodput.item() * 1e6 / 8 * TRANSFER_S / calls), LARGEST_NBYTES)
    vector = torch.zeros(nbytes // 4)
    rates = []
    for _ in range(calls + 1):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(vector)
        rates.append(8e-6 * nbytes / (time.perf_counter() - start_s))  # each of two ranks sends half of it twice
    del rates[0]  # its connections and buffers are new
    found = {"median": statistics.median(rates), "least": min(rates), "largest": max(rates)}
    return {f"allreduce_{name}_mbit_per_s": round(rate, 1) for name, rate in found.items()}


def _connected(receiver: str) -> socket.socket:
    """A connection to rank 1, which may not listen yet."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection((receiver, PORT))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        time.sleep(0.05)


def _cpu_s(pid: int | None) -> float:
    """Seconds of a core that a process has taken so far; 0 if there is none."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    return cells.main(Measurement("links", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
