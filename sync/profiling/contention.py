"""Measurement of contention: what a backward loses while a collective or a codec runs beside it.

A matrix product stands for backward. If it falls to a part ``f`` of its speed, what runs beside it takes
``capacity / f - demand`` of the resource: cores on the CPU, where the products keep ``demand`` cores busy; or the
device, whose capacity and demand are 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from .session import Session

_SIDE = 384
_ROUNDS = 3
LEAST, LARGEST = 0.5, 2.0
"""Limits of the ratio to the CPU seconds of what runs beside; more comes from other processes."""


def measure_taken(session: Session, beside: Callable[[], object], cores: float, busy: float) -> float:
    """The work on the resource of backward that ``beside`` takes from it. Collective; the slowest rank counts.

    Args:
        session: the measurement.
        beside: something that runs for a while; collectives must run equally often on all ranks.
        cores: cores of this rank.
        busy: cores that ``beside`` keeps busy when it runs alone.

    Returns:
        On the CPU relative to ``busy``, on a device relative to the time of ``beside``.
    """
    device = session.places.device
    on_cuda = device.type == "cuda"
    factor = torch.randn(_SIDE, _SIDE, device=device)
    lost = []
    for _ in range(_ROUNDS):
        alone = _rate(factor, lambda: time.sleep(session.extent.beside_s))
        lost.append(_rate(factor, beside) / alone)
    (share,) = session.ranks.slowest([-min(sorted(lost)[len(lost) // 2], 1.0)])  # the rank that loses least
    speed = max(-share, 0.05)
    if on_cuda:
        return min(1.0 / speed - 1.0, 1.0)
    demand = min(1.0, cores)  # backward's in the timeline
    taken = max(cores / speed - demand, 0.0)
    if cores > demand and taken <= cores - demand:
        return 1.0  # there were cores to spare
    return min(max(taken / max(busy, 0.01), LEAST), LARGEST)


def _rate(factor: torch.Tensor, beside: Callable[[], object]) -> float:
    """Matrix products per second while ``beside`` runs in another thread."""
    thread = threading.Thread(target=beside)
    start_s, count = time.perf_counter(), 0
    thread.start()
    while not count or thread.is_alive():  # one at least: a busy machine may end the other thread first
        torch.mm(factor, factor)
        count += 1
        if factor.is_cuda:
            torch.cuda.synchronize(factor.device)
    seconds = time.perf_counter() - start_s
    thread.join()
    return count / seconds
