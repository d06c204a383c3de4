"""Measurement of the speed of codecs in a fraction of a second, for profiles that are no longer right.

The machine may compute at another speed than when its profile was measured: at another frequency, or beside other
programs. So one encoding is timed again, as it was for the profile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gckernels.codec import Codec
from gckernels.ops import Identity

from ..communication.agreement import Failure, together
from ..communication.cores import Cores, running_s
from ..communication.ranks import Budget, Ranks
from ..planner.machines.machine import Machine
from ..planner.machines.profile import Profile
from ..planner.machines.scaling import scaled
from ..profiling.measurements.codecs import timed
from ..profiling.measurements.launches import Case, Work, bound
from ..profiling.measurements.memory import Arena
from ..profiling.measurements.session import MeasurementExtent, Session
from ..programs.stages import StageKind
from ..programs.steps import Place
from ..resources.memory_spaces import Places

ELEMENTS = 1 << 18
"""Elements of the encoding."""
OTHER = 1.5
"""Codecs that are as many times as fast or as slow as in the profile have another speed; prices of single calls may be
wrong by less."""
_FAR_NBYTES = 32 << 20


def measured_codec_speed(ranks: Ranks, machine: Machine, clock: Callable[[], float] = running_s) -> float | None:
    """How many times as fast as a profile says its first compressor encodes; ``None`` if it has none. Collective. The
    slowest rank counts.

    Args:
        ranks: all ranks.
        machine: the profile.
        clock: the seconds of calls that only compute.
    """
    if not isinstance(machine, Profile):
        return None
    known = [each for each in machine.codecs if (each.work, each.place) == (StageKind.ENCODE, Place.DEVICE)]
    model = next((each for each in known if not isinstance(each.compressor, Identity)), None)
    if model is None or not isinstance(model.compressor, Codec):
        return None
    method, case, slowdown = model.compressor, Case(1, ELEMENTS), Cores.of(ranks.group, ranks.device).slowdown

    extent = MeasurementExtent()

    def ready() -> tuple[Arena, list[Work]]:
        method.compile_host(recodes=True)
        arena = Arena(ranks.device, ELEMENTS, _FAR_NBYTES)
        starts = arena.starts(case.numel, case.sets * extent.rounds)
        return arena, [bound(arena, method, StageKind.ENCODE, case, start) for start in starts]

    found = together(ranks.group, ranks.device, ready)
    if isinstance(found, Failure):
        return None
    arena, calls = found
    session = Session(
        ranks,
        Budget(1.0, ranks),
        Places.of(ranks.device),
        machine.topology,
        extent,
        lambda share, name: None,
        lambda: clock() * slowdown,
    )
    ((now_s, _),) = timed(session, arena, [calls], case.sets)
    (then_s,) = model.coefficients.seconds(np.ones(1), np.full(1, float(case.numel)), 1).tolist()
    return then_s / now_s if min(now_s, then_s) > 0 else None


def with_codec_speed(machine: Machine, speed: float | None) -> Machine:
    """A machine whose codecs have the measured speed; unchanged if it is about the same.

    Args:
        machine: the machine as it was.
        speed: what :func:`measured_codec_speed` has returned.
    """
    return machine if speed is None or 1 / OTHER < speed < OTHER else scaled(machine, codec_speed=speed)
