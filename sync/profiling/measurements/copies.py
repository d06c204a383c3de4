"""Measurement of copies: in the memory of the device, and between device and host.

Copies between a device and its host have not been run: there was no GPU.
"""

from __future__ import annotations

import torch

from ...planner.machines.curves import CopyCurve
from ...planner.machines.machine import Shared
from .fits import CallCost, curve_of, typical
from .memory import Arena
from .session import Session
from .stopwatch import Stopwatch

SIZES = tuple(1 << shift for shift in range(16, 27))
_ROUNDS = 10  # the sizes take turns, so that other processes disturb few copies of each


def measure_copies(session: Session, arena: Arena, resource: Shared) -> CopyCurve:
    """The curve of copies over a resource. Collective. The slowest rank counts.

    Args:
        session: the measurement.
        arena: memory of the device.
        resource: ``TO_HOST`` or ``TO_DEVICE``, or the resource whose memory is copied.
    """
    sizes = [each for each in SIZES if each <= arena.numel * 4]
    arena.flush()
    rounds = [[_copy(session, arena, resource, nbytes) for nbytes in sizes] for _ in range(_ROUNDS + 1)]
    points = []
    for nbytes, found in zip(sizes, zip(*rounds[1:], strict=True), strict=True):
        walls, cores = zip(*found, strict=True)
        points.append(CallCost(nbytes, *session.ranks.slowest([typical(walls), typical(cores)])))
    return CopyCurve(resource, curve_of(points))


def _copy(session: Session, arena: Arena, resource: Shared, nbytes: int) -> tuple[float, float]:
    """Seconds and CPU seconds of a copy of data that is in no cache."""
    count = nbytes // 4
    source, target = arena.grads[:count], arena.outs[-count:]
    if resource in (Shared.TO_HOST, Shared.TO_DEVICE):
        on_host = torch.empty(count, dtype=torch.float32, device="cpu", pin_memory=session.places.device.type == "cuda")
        source, target = (source, on_host) if resource == Shared.TO_HOST else (on_host, target)
    arena.flush(whole=False)
    watch = Stopwatch(arena.device, session.clock)
    watch.mark()
    target.copy_(source, non_blocking=True)
    watch.mark()
    return watch.seconds()[-1], watch.cores_s()
