"""Measurement of contention: what a backward loses to collectives and codecs that run beside it.

A small network stands for the model. Its backward runs several times in a row, and something is started beside every
one of them, as buckets are launched during the backward of a model. The slowest rank counts, and all the time that it
loses. It can be more than the processor time of the work beside it, which fills the caches with other data, and finds
the cores of the machine taken by one rank or the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gckernels.devices import is_accelerator, synchronize
from gckernels.sync.resources.stage import Issue, Wait

from .session import Session

_WIDTH, _ROWS = 512, 64  # gradients of a megabyte, as large as backward's other data together
_BACKWARDS = 8  # in a row; something is started beside all but the last
_MARGIN = 3  # a backward takes this many times as long as what is started beside it
_NOTHING = 0.05  # a smaller part of the time of the work beside it is lost by chance
_IDLE = 0.01  # the least part of its time for which work beside backward has a core
_VAGUE = 0.25  # a larger error of the median says nothing
_MORE = 2  # rounds more than anything else has, the first of which does not count
LEAST, LARGEST = 0.5, 2.0
"""Limits of the ratio to the CPU seconds of what runs beside; more comes from other processes."""


def measure_taken(
    session: Session, starts: Sequence[Issue], cores: float, alone_s: float, cores_s: float
) -> float | None:
    """The seconds of backward's resource that work beside it takes. Collective; the slowest rank counts.

    Args:
        session: the measurement.
        starts: they start it, in turns.
        cores: cores of this rank.
        alone_s: seconds that it takes alone; the same on all ranks.
        cores_s: its CPU seconds.

    Returns:
        On the CPU relative to its CPU seconds, on a device relative to its time; ``None`` if the rounds disagree.
    """
    backward = _Backward(session)
    count = backward.repeats(_MARGIN * alone_s)
    pairs = []
    for _ in range(session.extent.rounds + _MORE):
        session.ranks.meet()
        without_s = backward.seconds(count, ())
        session.ranks.meet()
        beside_s = backward.seconds(count, starts)
        without_s, beside_s = session.ranks.slowest((without_s, beside_s))
        pairs.append((without_s, beside_s))
    own_cores = None if is_accelerator(session.places.device) else cores
    return agreed_taken(pairs[1:], alone_s, cores_s, own_cores)  # in the first round everything is new


def agreed_taken(
    pairs: Sequence[tuple[float, float]], alone_s: float, cores_s: float, cores: float | None
) -> float | None:
    """The result of :func:`measure_taken` for several rounds; ``None`` if they do not agree.

    A loaded machine slows down both backwards of a round, so their ratio is the same as on a quiet one. It counts for a
    backward as long as those of the quiet rounds. Rounds beyond a limit agree: on cores that are short, most of them
    are far above the largest value that counts.

    Args:
        pairs: seconds of the backwards of each round, without and with something beside all but the last.
        alone_s, cores_s, cores: as of :func:`taken_of`.
    """
    quiet_s = float(np.quantile([without_s for without_s, _ in pairs], 0.25))
    lost_s = ((beside_s / without_s - 1.0) * quiet_s / (_BACKWARDS - 1) for without_s, beside_s in pairs)
    taken = [taken_of(each, alone_s, cores_s, cores) for each in lost_s]
    least, median, largest = map(float, np.quantile(taken, (0.25, 0.5, 0.75)))
    return median if (largest - least) / math.sqrt(len(taken)) <= _VAGUE else None


def taken_of(lost_s: float, alone_s: float, cores_s: float, cores: float | None) -> float:
    """The work that makes backward lose ``lost_s`` seconds in the simulation of shared resources.

    Backward keeps one core busy there. If more is asked than there is, all slow down alike: work of ``w`` core seconds
    over ``alone_s`` takes ``(1 + w / alone_s) / cores`` times as long, and so does backward meanwhile.

    Args:
        lost_s: seconds that backward loses.
        alone_s: seconds of what ran beside, alone.
        cores_s: its CPU seconds.
        cores: cores of the rank; ``None`` if backward runs on a device.

    Returns:
        As of :func:`measure_taken`.
    """
    lost = max(lost_s, 0.0) / alone_s
    if cores is None:
        return min(lost, 1.0)
    demand = min(1.0, cores)
    taken_s = (cores * (1.0 + lost) - demand) * alone_s
    if cores > demand and lost < _NOTHING:
        return 1.0  # there were cores to spare
    return min(max(taken_s / max(cores_s, _IDLE * alone_s), LEAST), LARGEST)


class _Backward:
    """The forward and backward of a small network, some of them in a row.

    Args:
        session: the measurement.
    """

    def __init__(self, session: Session) -> None:
        self._session, device = session, session.places.device
        layers = [torch.nn.Linear(_WIDTH, _WIDTH, dtype=torch.float32, device=device) for _ in range(2)]
        self._model = torch.nn.Sequential(*layers)
        self._batch = torch.randn(_ROWS, _WIDTH, dtype=torch.float32, device=device)

    def repeats(self, least_s: float) -> int:
        """How many times the network is computed so that it takes ``least_s`` seconds; the same on all ranks."""
        self.seconds(1, ())
        (once_s,) = self._session.ranks.slowest([self.seconds(1, ()) / _BACKWARDS])
        return max(round(least_s / once_s), 1)

    def seconds(self, repeats: int, starts: Sequence[Issue]) -> float:
        """Seconds of all backwards, each computed ``repeats`` times, without waiting for what is started last."""
        waits: list[Wait] = []
        start_s = time.perf_counter()
        for index in range(_BACKWARDS):
            if starts and index < _BACKWARDS - 1:
                for wait in waits:
                    wait()
                waits = [starts[index % len(starts)]()]
            for _ in range(repeats):
                self._model.zero_grad()
                loss: Any = self._model(self._batch).square().mean()
                loss.backward()
        synchronize(self._batch.device)
        elapsed_s = time.perf_counter() - start_s
        for wait in waits:
            wait()
        return elapsed_s
