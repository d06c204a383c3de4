"""Buckets that are averaged in place, without compression: one collective each, as in DDP itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.futures import Future

from ..messages.message import DenseMessage
from ..resources.lanes import DeviceLanes
from .ranges import observer
from .timeline_recorder import TimelineRecorder

R = TypeVar("R")


def start_average(
    lanes: DeviceLanes,
    message: DenseMessage,
    step: int,
    phases: int,
    ended: Callable[[BaseException | None], R],
    recorder: TimelineRecorder | None = None,
) -> Future[R] | None:
    """Start the only message of a bucket in the calling thread, and return a future of what ``ended`` returns. Return
    ``None``, without doing anything, if the message must be submitted to its lane.

    No lane has a part in the average, so nothing waits for another thread or for another bucket. On the host of a
    device, one thread issues all collectives. The times of work on a device are recorded on its lane.

    Args:
        lanes: the lanes of the rank.
        message: the message.
        step: number of the training step.
        phases: number of collectives of the longest program.
        ended: as for :meth:`~gckernels.sync.resources.lane_kinds.Lane.start`.
        recorder: records the average; ``None`` to record nothing.
    """
    (stage,) = message.stages
    lane = lanes.lane(stage.spec.resource, stage.spec.phase)
    if not lanes.starts_immediately or (recorder is not None and lane.stream is not None):
        return None
    if (observe := observer(recorder, message, step, phases)) is not None:
        stage = observe(stage, lane)
    if recorder is not None:
        recorder.finish()
    assert stage.begin is not None
    return lane.start(stage.begin, ended)
