"""The lanes of a rank: for each phase one to compute, and one per channel to communicate.

They are of the kinds in :mod:`~gckernels.sync.resources.lane_kinds`. One thread feeds the streams of collectives of a
device with steps on the host, in the order of :mod:`~gckernels.sync.resources.collective_order`.

After an error, nothing runs on any lane of the same :class:`DeviceLanes`, because a collective after a failed one would
only wait for its timeout. Work that was submitted with ``failed`` gets the first error instead.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from gckernels.devices import current_stream, event_behind, is_accelerator, new_stream

from ..programs.lanes import MAX_PHASES, LaneKey, lane_key
from ..programs.stages import Resource
from .lane_kinds import FedStreamLane, Lane, StreamLane, ThreadLane
from .workers import LaneFailure, Pool, Queue, Token

if TYPE_CHECKING:
    from .collective_order import Rounds

_PATIENCE_S = 1.0  # how long closing waits for a queue after a failure


class DeviceLanes:
    """The lanes of one engine: for each phase one to compute, and one per channel to communicate.

    A lane is created when it is first used. The number of collectives before a stage decides its lane, so the first
    encoding of a message never queues behind the second encoding of the previous message.

    No deadlock is possible. Messages are submitted one after the other, with all of their stages, in the same order on
    all ranks. So the first unfinished stage of the first unfinished message waits for nothing, on any rank. In rounds,
    the same is true of the first unfinished collective of the first round.

    Args:
        device: the device of the gradients, which decides the kind of lanes.
        offloads: whether some stages run on the host of a device.
    """

    def __init__(self, device: torch.device, offloads: bool = False) -> None:
        self.device = device
        self.failure = LaneFailure()
        self._lanes: dict[tuple[LaneKey, int], Lane] = {}
        self._streams: dict[LaneKey, torch.Stream] = {}
        self._pools = [Pool("lanes", self.failure)]
        self._feeder = self._thread("collectives") if offloads and is_accelerator(device) else None
        self._rounds: Rounds | None = None
        if self._feeder is not None:
            from . import collective_order as order

            self._rounds = order.Rounds(self._feeder.put, MAX_PHASES)

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane, after which nothing runs."""
        return self.failure.error

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> Lane:
        """The lane of :func:`~gckernels.sync.programs.lanes.lane_key`."""
        shared = lane_key(resource, phase, channel)
        # lanes in rounds need the full number of the phase
        key = (shared, phase if self._is_in_rounds(resource) else shared.phase)
        if key not in self._lanes:
            self._lanes[key] = self._new(shared, phase)
        return self._lanes[key]

    def _new(self, key: LaneKey, phase: int) -> Lane:
        if not is_accelerator(self.device) or key.resource.on_host:
            communicates = key.resource.does == "communicate"
            return ThreadLane(key.name, self.failure, Queue(self._pools[0], keeps_thread=communicates))
        if key not in self._streams:
            self._streams[key] = new_stream(self.device)
        stream = self._streams[key]
        if self._feeder is None or self._rounds is None:
            return StreamLane(key.name, self.failure, stream)
        if self._is_in_rounds(key.resource):
            put = functools.partial(self._rounds.submit, phase)
            return FedStreamLane(key.name, self.failure, self._feeder, stream, put)
        return FedStreamLane(key.name, self.failure, self._thread(key.name), stream)

    def _thread(self, name: str) -> Queue:
        """A queue with a separate thread. Memory for temporaries belongs to a pair of thread and stream."""
        self._pools.append(Pool(name, self.failure))
        return Queue(self._pools[-1])

    def _is_in_rounds(self, resource: Resource) -> bool:
        """Whether lanes of ``resource`` get their work in the order of rounds."""
        return self._rounds is not None and resource.does == "communicate" and not resource.on_host

    def next_message(self, last_phase: int) -> None:
        """Begin the next message, to which everything submitted from now on belongs.

        Args:
            last_phase: phase of its last stage.
        """
        if self._rounds is not None:
            self._rounds.next_message(last_phase)

    def end_step(self) -> None:
        """Declare that the next message is submitted only after all others are done."""
        if self._rounds is not None:
            self._rounds.end_step()

    @property
    def starts_immediately(self) -> bool:
        """Whether the submitting thread may start a collective itself, in the order of all collectives."""
        return self._rounds is None

    def here(self, stream: torch.Stream | None = None) -> Token:
        """A token for the work of the calling thread so far.

        Args:
            stream: on a device, the stream of the work; by default the current one.
        """
        if not is_accelerator(self.device):
            return Token(is_done=True)
        return Token(event_behind(current_stream(self.device) if stream is None else stream), is_done=True)

    def settle(self) -> None:
        """After a failure, wait until no thread computes. Collectives, which may wait for their timeouts, go on."""
        for (key, _), lane in list(self._lanes.items()):  # a copy: another thread may create a lane
            if key.resource.does == "compute" and isinstance(lane, ThreadLane):
                lane.queue.settle()

    def finish(self) -> None:
        """Wait until threads have done all work that has been submitted, if this is none of them. Work on a device may
        go on."""
        self.end_step()
        if not any(pool.runs_here for pool in self._pools):
            self._drain()

    def close(self) -> None:
        """Finish all work, also on the device, and close all lanes; further calls do nothing.

        After a failure the device is not waited for, because it may be in a collective that never ends.
        """
        self.finish()
        for pool in list(self._pools):
            pool.close()
        for stream in list(self._streams.values()):
            if self.failure.error is None:
                stream.synchronize()

    def _drain(self) -> None:
        """Wait until all queued work is done; after a failure, at most one second for each queue, which may be stuck.

        Nothing may be submitted meanwhile.
        """
        lanes = [lane for lane in list(self._lanes.values()) if isinstance(lane, ThreadLane)]
        queues = {queue for lane in lanes for queue in lane.queues}
        for end in [queue.last() for queue in queues]:
            while not end.join(_PATIENCE_S) and self.failure.error is None:
                pass
