"""Measurement of the rate of the network in a fraction of a second, for profiles that are no longer right."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..communication.ranks import Ranks
from ..planner.machines.machine import Machine, MachineError
from ..planner.machines.scaling import scaled, sending_bit_per_s
from ..programs.lanes import IN_FLIGHT

LARGEST_S = 0.03
"""Seconds of a call from which no larger one is measured."""
LONGEST_S = 0.25
"""Seconds in which the measurement ends on links from about 20 Mbit/s up; slower ones are measured once."""
_TRAIN = 2 * IN_FLIGHT
_ROUNDS = 3
_KI = 1 << 10


def measured_bit_per_s(ranks: Ranks, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """The bits per second that a rank sends in all-reduces that follow one another; ``None`` if more bytes take no
    longer. Collective.

    The rate is that between two sizes, as in :func:`~gckernels.sync.planner.machines.scaling.sending_bit_per_s`, so
    that latencies have no part in it. The slowest rank counts.

    Args:
        ranks: all ranks.
        clock: returns seconds.
    """
    small, large = 16 * _KI, 64 * _KI
    vector = torch.zeros(4096 * _KI // 4, dtype=torch.float32, device=ranks.device)
    spent_s = _train(ranks, vector[: small // 4], 1, clock)  # wakes the connections
    while large < vector.nbytes:
        call_s = _train(ranks, vector[: large // 4], 1, clock)
        spent_s += call_s
        if call_s > LARGEST_S / 4:
            break
        small, large = large, 4 * large
    rounds: list[tuple[float, float]] = []
    while len(rounds) < _ROUNDS:
        small_s, large_s = (_train(ranks, vector[: nbytes // 4], _TRAIN, clock) for nbytes in (small, large))
        rounds.append((small_s, large_s))
        round_s = _TRAIN * (small_s + large_s)
        spent_s += round_s
        if spent_s + round_s > LONGEST_S:
            break
    small_s, large_s = statistics.median(each for each, _ in rounds), statistics.median(each for _, each in rounds)
    if large_s <= small_s:
        return None
    sent = 2 * (ranks.world_size - 1) / ranks.world_size  # bytes that a rank sends for each byte of the vector
    return 8 * sent * (large - small) / (large_s - small_s)


def with_link(machine: Machine, bit_per_s: float | None) -> Machine:
    """A machine as it is with the measured rate of its network; unchanged if the rate is about the same, or the machine
    tells none.

    Args:
        machine: the machine as it was.
        bit_per_s: what :func:`measured_bit_per_s` has returned.
    """
    if bit_per_s is None:
        return machine
    try:
        known = sending_bit_per_s(machine)
        return machine if 0.8 < bit_per_s / known < 1.25 else scaled(machine, bandwidth_bit_per_s=bit_per_s)
    except MachineError:
        return machine


def _train(ranks: Ranks, vector: torch.Tensor, calls: int, clock: Callable[[], float]) -> float:
    """Seconds of a call in a train of all-reduces, of the slowest rank."""
    ranks.meet()
    _settle(ranks.device)
    start_s = clock()
    works: deque[Any] = deque()
    for _ in range(calls):
        if len(works) == IN_FLIGHT:
            works.popleft().wait()
        works.append(dist.all_reduce(vector, group=ranks.group, async_op=True))
    for work in works:
        work.wait()
    _settle(ranks.device)
    return ranks.slowest([(clock() - start_s) / calls])[0]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
