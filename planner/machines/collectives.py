"""Laws of collectives: the messages that follow one another, and the bytes that each link carries.

The seconds of a collective are ``hops * latency + bytes / rate``, with the bytes of the busiest link. Bytes are given
relative to ``w``, the bytes that a rank sends as a mean over all ranks, because that is what a price is asked for. In
the following, ``n`` ranks take part, on ``M`` machines with ``D`` devices each (``N = M D``). ``s`` devices share a
link; a machine has ``k = D / s`` network cards.

On one level every link is alike:

- *Rings* (all-reduce in two passes, reduce-scatter and all-gather in one, and a hop). Every rank sends ``w`` bytes to
  the next one, in ``n - 1`` hops per pass. A shared link carries ``s w``. Between machines ``D`` rings run at the same
  time, one for each device of a machine, and ``s`` of them share a card, which gives the same.
- *All-reduces between devices of several machines* take the fastest algorithm for their size, as in NCCL (its model of
  this is ``tuning.cc``): a ring, or a *double binary tree*. Each of its two trees adds up one half, in ``ceil(log2 n)``
  hops up and as many down. A machine is a leaf of one tree and inside the other. So a link carries the bytes of the
  vector twice, ``n w / (n - 1)``, or between two machines once, ``w``. On hosts Gloo has a ring.
- *All-to-all*, in ``n - 1`` exchanges with one partner each: also ``s w``.
- *Gather*. Every rank but the root sends its payload of ``n w / (n - 1)`` bytes. The root's link carries ``n w``, from
  one rank after the other. Between machines the roots of all ``D`` groups are in one machine: ``n s w``.
- *Broadcast* and *reduce* on a device, in a pipeline: every link carries the result of ``n w / (n - 1)`` bytes once. On
  a host the broadcast is a binomial tree, whose root sends ``ceil(log2 n)`` copies. The reduce is a reduce-scatter and
  a gather, whose root receives ``w`` bytes twice. Both take ``ceil(log2 n)`` hops.

On all ranks of several machines with several devices:

- *Rings* go through a machine before they leave it, so all of its cards together carry ``w``, and not ``D w``. This
  holds for the all-gather as well, whose ``w`` is ``N - 1`` payloads: all payloads but one cross every border once.
  A pass has ``M - 1`` hops between machines and ``M (D - 1)`` inside them. A single hop crosses one card.
- *All-reduces between devices* take the fastest of three algorithms. A *tree* is a chain inside machines, ``D - 1``
  hops, and a double tree between them: the cards of a machine together carry ``N w / (N - 1)``, or half of that between
  two machines. The third one is *hierarchical*, as in Horovod and BytePS: a reduce-scatter inside machines, a ring
  between them for each device, an all-gather inside machines, one after the other. The cards of a machine together
  carry ``q w``, with ``q = (N - D) / (N - 1)``, the least that is possible, and links inside carry ``M (1 - q) w``.
- *All-to-all*: the fraction ``q`` of a rank's bytes leaves the machine, and a card carries ``q s w``.
- *Gather*: one card of the root's machine receives ``q N w``.
- *Broadcast* and *reduce*: as on one level, over all cards of a machine together.

After a reduction to roots inside the machines, only these send, but ``w`` is still a mean over all ranks. A root sends
``D w``, all of it over its own card.

The mean over all links of a kind is less than the bytes of the busiest link where there is a root. The messages of a
step may have roots on all ranks, which work at the same time. How much of the difference a link has to bear depends on
where the roots are, which ``unevenness`` in :file:`planner/timeline/priced_stages.py` says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gckernels.sync.programs.steps import KINDS, Collective, Level
from gckernels.sync.programs.topology import Topology

from .machine import MachineError, Shared

_PASSES = {"AllReduce": 2, "ReduceScatter": 1, "AllGather": 1}


@dataclass(frozen=True)
class Use:
    """The use that a collective makes of one kind of link.

    Attributes:
        hops: messages that follow one another.
        busiest: bytes through the busiest link, for each byte that a rank sends as a mean.
        mean: bytes through a link as a mean over the links, likewise.
    """

    hops: int
    busiest: float
    mean: float


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of a collective.

    Attributes:
        uses: the use of each kind of link, :attr:`~.machine.Shared.INTER` and :attr:`~.machine.Shared.INTRA`.
        in_turn: whether the links are used one after the other, and not at the same time.
    """

    uses: Mapping[Shared, Use]
    in_turn: bool = False


@functools.lru_cache(maxsize=1024)
def algorithms_of(
    step: str,
    level: Level,
    topology: Topology,
    in_pipeline: bool,
    from_roots: bool = False,
    cards: int = 1,
    links: int = 1,
) -> tuple[Algorithm, ...]:
    """The algorithms of a collective, of which the fastest is used. The first one of an all-reduce is a ring.

    Args:
        step: the name of the collective.
        level: the ranks that take part.
        topology: the machines and their devices.
        in_pipeline: whether broadcast and reduce are pipelines, as on devices, and not trees.
        from_roots: whether one device of each machine has all data of the machine, and takes part alone.
        cards: devices of a machine that share a network card.
        links: devices of a machine that share a link inside it.

    Raises:
        MachineError: there is no such collective.
    """
    if step not in KINDS or not issubclass(KINDS[step], Collective):
        raise MachineError(f"{step!r}: is no collective")
    machines, devices = topology.machines, topology.devices
    chooses = step == "AllReduce" and in_pipeline
    if topology.size(level) == 1:
        return (Algorithm({}),)
    if level == Level.INTRA or machines == 1:
        return (Algorithm({Shared.INTRA: _on_one_level(step, topology.size(level), links, links, 1, in_pipeline)}),)
    if level == Level.INTER or devices == 1:
        busy = devices if from_roots else cards
        usual = Algorithm({Shared.INTER: _on_one_level(step, machines, cards, busy, busy, in_pipeline)})
        return (usual, Algorithm({Shared.INTER: _tree(machines, cards, busy)})) if chooses else (usual,)
    usual = Algorithm(_on_all_ranks(step, topology, cards, links, in_pipeline))
    return (usual, *_over_levels(topology, cards, links)) if chooses else (usual,)


def _on_one_level(step: str, ranks: int, shared_by: int, busy: int, received: int, in_pipeline: bool) -> Use:
    """The use of the links of one level.

    Args:
        step: the name of the collective.
        ranks: the number of ranks.
        shared_by: devices that share a link.
        busy: the devices whose bytes the busiest link carries.
        received: the devices for which it receives what they gather.
        in_pipeline: as for :func:`algorithms_of`.
    """
    result = ranks / (ranks - 1)  # bytes of the result of a broadcast, for each byte that a rank sends as a mean
    depth = math.ceil(math.log2(ranks))
    match step:
        case "AllReduce" | "ReduceScatter" | "AllGather":
            return Use(_PASSES[step] * (ranks - 1), busy, shared_by)
        case "Hop":
            return Use(1, busy, shared_by)
        case "AllToAll":
            return Use(ranks - 1, busy, shared_by)
        case "Gather":
            return Use(ranks - 1, max(ranks * received, shared_by), shared_by)
        case _ if in_pipeline:
            return Use(depth, result * busy, result * shared_by)
        case "Broadcast":
            return Use(depth, depth * result * busy, shared_by)
        case _:
            return Use(depth, 2 * busy, (1 + 1 / ranks) * shared_by)


def _tree(machines: int, mean: float, busy: float) -> Use:
    """The use of the links between machines by an all-reduce in a double tree.

    Args:
        machines: the number of machines.
        mean, busy: the bytes that a link carries, as a mean and at most, where ``w`` is what all machines together send
            for each of them.
    """
    carried = 1.0 if machines == 2 else machines / (machines - 1)
    return Use(2 * math.ceil(math.log2(machines)), carried * busy, carried * mean)


def _over_levels(topology: Topology, cards: int, links: int) -> tuple[Algorithm, Algorithm]:
    """An all-reduce of all ranks in a tree, and the hierarchical one; the arguments are those of
    :func:`_on_all_ranks`."""
    machines, devices, ranks = topology.machines, topology.devices, topology.world_size
    leaving = (ranks - devices) / (ranks - 1)
    between, inside = leaving * cards / devices, machines * (1 - leaving) * links
    chain = Use(2 * (devices - 1), ranks / (ranks - 1) * links, ranks / (ranks - 1) * links)
    ring, rest = Use(2 * (machines - 1), between, between), Use(2 * (devices - 1), inside, inside)
    return (
        Algorithm({Shared.INTER: _tree(machines, between, between), Shared.INTRA: chain}),
        Algorithm({Shared.INTER: ring, Shared.INTRA: rest}, in_turn=True),
    )


def _on_all_ranks(step: str, topology: Topology, cards: int, links: int, in_pipeline: bool) -> Mapping[Shared, Use]:
    """The use of the links between and inside machines, if there are several machines with several devices.

    Args:
        step: the name of the collective.
        topology: the machines and their devices.
        cards: devices that share a network card.
        links: devices that share a link inside the machine.
        in_pipeline: as for :func:`algorithms_of`.
    """
    machines, devices, ranks = topology.machines, topology.devices, topology.world_size
    per_card = cards / devices  # the part of the bytes leaving a machine that goes through one card
    leaving = (ranks - devices) / (ranks - 1)
    staying = 1 - leaving
    result = ranks / (ranks - 1)
    between, inside = math.ceil(math.log2(machines)), math.ceil(math.log2(devices))
    match step:
        case "AllReduce" | "ReduceScatter" | "AllGather":
            passes = _PASSES[step]
            inter = Use(passes * (machines - 1), per_card, per_card)
            intra = Use(passes * machines * (devices - 1), links, links)
        case "Hop":
            inter, intra = Use(1, 1, per_card), Use(0, links, links)
        case "AllToAll":
            inter = Use(ranks - devices, leaving * cards, leaving * cards)
            intra = Use(devices - 1, staying * links, staying * links)
        case "Gather":
            inter = Use(ranks - devices, leaving * ranks, leaving * cards)
            intra = Use(devices - 1, staying * ranks, staying * links)
        case _ if in_pipeline:
            inter = Use(between, result * per_card, result * per_card)
            intra = Use(inside, result * links, result * links)
        case "Broadcast":
            inter = Use(between, between * result, result * per_card)
            intra = Use(inside, inside * result * links, result * links)
        case _:
            inter = Use(between, 2, (1 + 1 / ranks) * per_card)
            intra = Use(inside, 2 * links, (1 + 1 / ranks) * links)
    return {Shared.INTER: inter, Shared.INTRA: intra}
