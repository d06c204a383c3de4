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
from ..resources.memory_spaces import Places
from .groups import Wanted, make_groups
from .links import RankConnections

_META_PLACES = Places(torch.device("meta"), torch.device("meta"), apart=False)


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
        ranks: the ranks of ``group``, numbered as in the job.
        places: as given.
        topology: as given.
        phases: number of collectives of the longest program.
        name: a name that no other communicators of the job have, the same on all ranks.
        averaging: the link for averages without compression. It is separate from the others because the submitting
            thread issues these averages itself, immediately.
        offloads: whether some collectives send from the host of a device.

    Raises:
        NotConnected: some rank cannot connect. Every rank raises.
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
        self.ranks = ranks = dist.get_process_group_ranks(group)
        backend = group._get_backend(places.device)  # has the timeout of the group; new_group would take the default

        def wanted(members: Sequence[int], name: str, gloo: bool = False) -> Wanted:
            made_by = dist.Backend.GLOO if gloo else backend.name()
            return Wanted([ranks[member] for member in members], name, made_by, backend.options._timeout)

        exchanging: dict[tuple[int, Level, Place], bool] = {}
        for site in sites:
            key = site.phase % MAX_PHASES, site.level, places.actual(site.place)
            exchanging[key] = exchanging.get(key, False) or site.exchanges
        needed = [wanted(range(self.world_size), "averaging")]
        links: dict[tuple[int, Level, Place, int], tuple[list[int], bool]] = {}
        for key in sorted(exchanging, key=lambda key: (key[0], key[1].value, key[2].value)):
            phase, level, place = key
            (mine,) = (members for members in topology.groups(level) if self.rank in members)
            gloo = place == Place.HOST or backend.name() == dist.Backend.GLOO
            exchanges = gloo and exchanging[key] and places.memory(place).type == "cpu"
            for channel in range(channels):
                name = f"{phase}-{level.value}-{place.value}-{channel}"
                names = [name, f"{name}-back"] if exchanges else [name]
                needed += [wanted(mine, each, gloo) for each in names]
                links[*key, channel] = list(mine), exchanges
        made = iter(make_groups(group, places.device, needed))
        self.averaging = RankConnections(self.world_size, self.rank, [next(made)])
        self.name = str(self.averaging.group.group_name)
        self._links = {
            key: RankConnections(len(members), members.index(self.rank), [next(made) for _ in range(1 + exchanges)])
            for key, (members, exchanges) in links.items()
        }

    def link(
        self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE
    ) -> RankConnections:
        """The link for a collective.

        Args:
            phase: number of collectives that precede it in its program.
            level: which ranks take part.
            channel: from 0 to ``channels - 1``.
            place: where the data lies.
        """
        return self._links[phase % MAX_PHASES, level, self.places.actual(place), channel]

    def hang_up(self) -> None:
        """Close the connections of this rank, so that ranks that wait for it fail."""
        for link in (self.averaging, *self._links.values()):
            link.hang_up()

    def close(self) -> None:
        """Destroy all groups; further calls do nothing."""
        for link in (self.averaging, *self._links.values()):
            link.close()


@dataclass(frozen=True)
class DryCommunicators:
    """A stand-in for :class:`Communicators` that sends nothing, for building messages only to learn their sizes."""

    rank: int  # the rank that messages are built for
    topology: Topology  # the topology of all ranks
    places: Places = _META_PLACES
    """The memories of that rank; by default tensors are without memory, on the device ``meta``."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def averaging(self) -> RankConnections:
        """A link without connections."""
        return RankConnections(self.world_size, self.rank)

    def link(
        self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE
    ) -> RankConnections:
        """A link without connections."""
        return RankConnections(self.topology.size(level), self.topology.index(level, self.rank))
