"""The connections of a rank: a link for every phase, level, place and channel.

Collectives of different phases and channels are in flight at the same time, and so are those of DDP itself. Each
combination therefore has separate process groups, in which collectives are issued in the order of submission.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..programs.lanes import MAX_PHASES
from ..programs.rules import Site
from ..programs.steps import Level, Place
from ..programs.topology import Topology
from .groups import draw_number, make_group
from .links import Link
from .places import Places

_TEXT_NBYTES = 4096
_META_PLACES = Places(torch.device("meta"), torch.device("meta"), apart=False)

# torch 2.13 deprecates the older names, torch 2.11 has only those
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicators:
    """The process groups of a rank. Construction is collective over ``group``.

    Args:
        group: all ranks, ``topology.world_size`` of them.
        places: the memories of this rank. Data on the host of a device is sent by Gloo, whatever the backend of
            ``group``.
        topology: which ranks share a machine.
        sites: the sites of all collectives except averages without compression.
        channels: number of links for each site.

    Attributes:
        rank: rank of the calling process in ``group``.
        world_size: number of ranks in ``group``.
        places: as given.
        topology: as given.
        phases: number of collectives of the longest program.
        averaging: the group for averages without compression. It is separate from the others because the submitting
            thread issues these averages itself, immediately.
        offloads: whether some collectives send from the host of a device.
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
        self.phases = max((1 + site.phase for site in sites), default=1)
        self.offloads = any(places.actual(site.place) == Place.HOST for site in sites)
        ranks = dist.get_process_group_ranks(group)
        backend = group._get_backend(places.device)  # has the timeout of the group; new_group would take the default
        number = draw_number(group, places.device)

        def new_group(members: list[int], name: str, gloo: bool) -> dist.ProcessGroup:
            return make_group(
                [ranks[member] for member in members],
                f"gckernels/{number}/{name}/{ranks[members[0]]}",
                dist.Backend.GLOO if gloo else backend.name(),
                backend.options._timeout,
                f"gckernels-{name}",
            )

        self.averaging = new_group(list(range(self.world_size)), "averaging", gloo=False)
        self._links: dict[tuple[int, Level, Place, int], Link] = {}
        wanted: dict[tuple[int, Level, Place], bool] = {}
        for site in sites:
            key = site.phase % MAX_PHASES, site.level, places.actual(site.place)
            wanted[key] = wanted.get(key, False) or site.exchanges
        for key in sorted(wanted, key=lambda key: (key[0], key[1].value, key[2].value)):
            phase, level, place = key
            (mine,) = (members for members in topology.groups(level) if self.rank in members)
            gloo = place == Place.HOST or backend.name() == dist.Backend.GLOO
            exchanges = gloo and wanted[key] and places.memory(place).type == "cpu"
            for channel in range(channels):
                name = f"{phase}-{level.value}-{place.value}-{channel}"
                onward = new_group(mine, name, gloo)
                back = new_group(mine, f"{name}-back", gloo) if exchanges else None
                self._links[*key, channel] = Link(len(mine), mine.index(self.rank), onward, back)
        _connect(group, self._groups(), places.device)

    def link(self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE) -> Link:
        """The link for a collective.

        Args:
            phase: number of collectives that precede it in its program.
            level: which ranks take part.
            channel: from 0 to ``channels - 1``.
            place: where the data lies.
        """
        return self._links[phase % MAX_PHASES, level, self.places.actual(place), channel]

    def _groups(self) -> list[dist.ProcessGroup]:
        """All groups, in the order in which they were made."""
        return [self.averaging, *(group for link in self._links.values() for group in link.groups)]

    def close(self) -> None:
        """Destroy all groups; further calls do nothing."""
        for group in self._groups():
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._links = {}


@dataclass(frozen=True)
class DryCommunicators:
    """A stand-in for :class:`Communicators` that sends nothing, for building messages only to learn their sizes.

    Attributes:
        rank: the rank that messages are built for.
        topology: the topology of all ranks.
        places: the memories of that rank; by default tensors are without memory, on the device ``meta``.
    """

    rank: int
    topology: Topology
    places: Places = _META_PLACES

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def phases(self) -> int:
        """Number of collectives that have groups: none."""
        return 0

    @property
    def offloads(self) -> bool:
        """Whether some collectives send from the host of a device: never."""
        return False

    @property
    def averaging(self) -> None:
        """No group."""
        return None

    def link(self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE) -> Link:
        """A link without connections."""
        return Link(self.topology.size(level), self.topology.index(level, self.rank))


def _connect(group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Return when every rank of ``group`` has connected to its ``groups``.

    All backends but Gloo connect in the first collective of a group. It takes place here: in one order,
    from one thread, outside any training step. No rank may go on, and perhaps destroy its groups, while another one is
    still connecting to them: the connection would fail or hang.
    """
    lazy = [each for each in groups if dist.get_backend(each) != dist.Backend.GLOO]
    for each in (*lazy, group):
        connected = torch.ones(1, device=device)
        dist.all_reduce(connected, group=each)
    connected.item()  # waits for the device


def exchange_text(group: dist.ProcessGroup, device: torch.device, text: str) -> list[str]:
    """The texts of all ranks, in rank order. Collective; nothing is unpickled.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        text: the text of this rank, cut to 4096 bytes of UTF-8.
    """
    encoded = text.encode()[:_TEXT_NBYTES]
    sent = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
    sent[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
    received = torch.empty(dist.get_world_size(group), _TEXT_NBYTES, dtype=torch.uint8, device=device)
    all_gather(received.view(-1), sent.to(device), group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in received.cpu()]
