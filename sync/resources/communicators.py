"""Who talks to whom: one communicator for every phase, level, place and channel.

Collectives of different phases and channels are in flight at the same time, and those of DDP itself besides; each of
them therefore has a process group of its own, in which the order of issue is the order of submission.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from ..programs.rules import Site
from ..programs.steps import Level, Place
from ..programs.topology import Topology
from .groups import draw_number, make_group
from .lanes import MOST_PHASES
from .places import Places

_TEXT_NBYTES = 4096

# torch 2.13 deprecates the older names, torch 2.11 has no others
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicators:
    """The process groups of the phases. Building it is collective: every rank of ``group`` must.

    Args:
        group: all ranks, ``topology.world_size`` of them.
        places: of this rank. What is on the host of a device is sent by Gloo, whatever ``group`` sends with.
        topology: which of them are on one machine.
        sites: of every collective that there will be, but for averages without compression.
        channels: how many groups each of those has.

    Attributes:
        rank, world_size: of the calling process in ``group``.
        places: as given.
        topology: as given.
        phases: collectives of the longest program.
        averaging: the group of what is averaged without compression. It has one of its own, because a thread of its own
            issues that: the one that submits, at once.
        offloads: some of them are on the host of a device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        places: Places,
        topology: Topology,
        sites: Collection[Site],
        channels: int = 1,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.places, self.topology = places, topology
        self.phases = max((1 + phase for phase, *_ in sites), default=1)
        self.offloads = any(places.actual(place) == Place.HOST for *_, place in sites)
        ranks = dist.get_process_group_ranks(group)
        # where torch keeps a group's timeout; new_group would take the default
        backend = group._get_backend(places.device)
        number = draw_number(group, places.device)

        def new_group(members: list[int], name: str, gloo: bool) -> dist.ProcessGroup:
            return make_group(
                [ranks[member] for member in members],
                f"gckernels/{number}/{name}/{ranks[members[0]]}",
                "gloo" if gloo else backend.name(),
                backend.options._timeout,
                f"gckernels-{name}",
            )

        self.averaging = new_group(list(range(self.world_size)), "averaging", gloo=False)
        self._groups: dict[tuple[int, Level, Place, int], dist.ProcessGroup] = {}
        wanted = {(phase % MOST_PHASES, level, places.actual(place)) for phase, level, place in sites}
        for phase, level, place in sorted(wanted, key=lambda site: (site[0], site[1].value, site[2].value)):
            (mine,) = (members for members in topology.groups(level) if self.rank in members)
            for channel in range(channels):
                name = f"{phase}-{level.value}-{place.value}-{channel}"
                self._groups[phase, level, place, channel] = new_group(mine, name, gloo=place == Place.HOST)
        _connect(group, [self.averaging, *self._groups.values()], places.device)

    def group(
        self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE
    ) -> dist.ProcessGroup:
        """The group for a collective of ``level``, of what lies at ``place``, that ``phase`` others precede in its
        program."""
        return self._groups[phase % MOST_PHASES, level, self.places.actual(place), channel]

    def close(self) -> None:
        """Destroy all groups; further calls do nothing."""
        for group in (self.averaging, *self._groups.values()):
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._groups = {}


def _connect(group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Return when every rank of ``group`` has connected to its ``groups``.

    Those that connect with their first collective, as all but Gloo's do, have that now: in one order, from one thread,
    and not in the middle of a training step. And no rank may go on, and perhaps destroy its groups again, while another
    one is connecting to them: that fails there, or never ends.
    """
    lazy = [each for each in groups if dist.get_backend(each) != dist.Backend.GLOO]
    for each in (*lazy, group):
        connected = torch.ones(1, device=device)
        dist.all_reduce(connected, group=each)
    connected.item()  # waits for a device, too


def exchange_text(group: dist.ProcessGroup, device: torch.device, text: str) -> list[str]:
    """Every rank's ``text``, in rank order; what is longer than 4096 bytes in UTF-8 is cut. Nothing is unpickled."""
    encoded = text.encode()[:_TEXT_NBYTES]
    sent = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
    sent[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
    received = torch.empty(dist.get_world_size(group), _TEXT_NBYTES, dtype=torch.uint8, device=device)
    all_gather(received.view(-1), sent.to(device), group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in received.cpu()]
