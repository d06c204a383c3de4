"""The policy ``secopa``: HiPress' planner, which decides for each gradient alone (Bai et al., SOSP 2021, section 3.3).

The cost model of SeCoPa says whether to compress a gradient, and into how many parts to cut it, from the time of five
primitives. Counts and constants are those of its published code, which differ a little from the paper: a parameter
server's serial work is ``K`` encodings and ``N + K - 2`` decodings for ``K < N`` parts and ``N`` nodes, the code has
one more of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from gckernels.codec import Codec
from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.named import ALLREDUCE, ring
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import (
    AllGather,
    Broadcast,
    Decode,
    Encode,
    Gather,
    Level,
    Place,
    Program,
    Reduce,
    ReduceScatter,
)
from gckernels.sync.programs.topology import Topology

from ..drafts.drafts import Draft, LaunchDraft, Launches, MessageDraft, Option, plan_of, spread, usual_launches
from ..drafts.problem import Problem
from ..machines.machine import Floats, Machine, MachineError
from .baselines import fastest, none
from .messages import MAX_PARTS, codecs, each_alone, has_levels, preselected

SIZES = (1 << 14, 1 << 24)
"""Numbers of elements between which the primitives are taken to be straight lines."""


def secopa(problem: Problem) -> Plan:
    """The fastest plan that SeCoPa can make: by servers or around a ring, with launches of one gradient or of several.

    Gradients are added inside a machine first. SeCoPa then decides with its cost model, whose primitives are taken from
    the machine. The parts of a compressed gradient go to different servers. A gradient that is not compressed is sent
    through servers in parts, or averaged in place. Without compressors, or without nodes to exchange with, it is the
    plan of ``none``.
    """
    choices = [
        choice
        for compressor in codecs(problem)
        for exchange in Exchange
        for choice in option_choices(problem, compressor, exchange)
    ]
    together = usual_launches(problem)
    if not choices:
        return none(problem)
    drafts = [by_option(together, choice) for choice in choices]
    chosen = preselected(problem, drafts)
    plans = {with_spread_roots(plan_of(problem, drafts[at])): choices[at] for at in chosen}
    best = fastest(problem, list(plans))
    alone = with_spread_roots(plan_of(problem, by_option(each_alone(problem), plans[best])))
    return fastest(problem, [best, alone])


def machine_costs(machine: Machine, compressor: Codec) -> SecopaCosts:
    """SeCoPa's primitives on a machine, as straight lines through the prices at two sizes.

    Raises:
        MachineError: the machine lacks a price.
    """
    topology = machine.topology
    level = Level.INTER if has_levels(topology) else Level.FLAT
    nodes = topology.size(level)
    numels = np.array(SIZES, dtype=np.float64)
    ratio = compressor.payload_nbytes(SIZES[1]) / (4 * SIZES[1])

    def line(seconds: Sequence[float], over: Sequence[float]) -> Primitive:
        each_s = max((seconds[1] - seconds[0]) / (over[1] - over[0]), 0.0)
        return Primitive(max(seconds[0] - each_s * over[0], 0.0), each_s)

    def codec(kind: StageKind, sent: float) -> Primitive:
        price = machine.codec(kind, compressor, Place.DEVICE, np.ones(2), numels, 1)
        return line(price.alone_s.tolist(), (numels * sent).tolist())

    def sending(step: str, share: float) -> Primitive:
        price = machine.collective(step, level, Place.DEVICE, 4 * numels * share)
        return line(price.alone_s.tolist(), numels.tolist())

    at_root = (nodes - 1) / nodes  # bytes that a rank sends to the root, as a mean over all ranks
    return SecopaCosts(
        nodes,
        codec(StageKind.ENCODE, 1.0),
        codec(StageKind.DECODE, ratio),
        sending("Gather", at_root),
        sending("Broadcast", at_root),
        sending("Hop", 1.0),
        ratio,
    )


def option_choices(problem: Problem, compressor: Codec, exchange: Exchange) -> Iterator[tuple[Option, ...]]:
    """The options of all tensors by SeCoPa's decisions; nothing if the exchange is not possible."""
    levels = has_levels(problem.topology)
    level = Level.INTER if levels else Level.FLAT
    nodes = problem.topology.size(level)
    sums = compressor.traits.averages and not compressor.traits.applies_momentum  # needed by a ring
    if nodes < 2 or (exchange == Exchange.RING and not sums):
        return
    try:
        costs = machine_costs(problem.machine, compressor)
    except MachineError:
        return
    shards = problem.topology.devices if levels else 1
    by_servers = (Encode(), Gather(level), Decode(), Encode(), Broadcast(level), Decode())
    compressed = _around(ring(nodes, level) if exchange == Exchange.RING else by_servers, levels)
    exact = _around((Reduce(level), Broadcast(level)), levels)
    sizes = {-(-tensor.numel // shards) for tensor in problem.trace.tensors}
    decisions = {numel: decide(numel, costs, exchange) for numel in sizes}
    most = max(1, MAX_PARTS // len(problem.trace.tensors))
    for through_servers in (False, True) if exchange == Exchange.SERVER else (False,):
        chosen = []
        for number, tensor in enumerate(problem.trace.tensors):
            decision = decisions[-(-tensor.numel // shards)]
            if decision.compress and problem.may_use(number, compressor):
                parts = min(decision.parts, most) if exchange == Exchange.SERVER else 1
                chosen.append(Option(compressed, compressor, parts))
            elif through_servers and problem.encodable(number):
                chosen.append(Option(exact, None, 1 if decision.compress else min(decision.parts, most)))
            else:
                chosen.append(Option(ALLREDUCE))
        yield tuple(chosen)


def with_spread_roots(plan: Plan) -> Plan:
    """The plan with the roots of its messages spread over the ranks."""
    numels: dict[int, int] = {}
    for unit in plan.units:
        if unit.message is not None and any(isinstance(step, Broadcast) for step in unit.program):
            numels[unit.message] = numels.get(unit.message, 0) + unit.numel
    roots = spread(numels, plan.topology or Topology(1))
    units = (
        replace(unit, root=roots.get(-1 if unit.message is None else unit.message, unit.root)) for unit in plan.units
    )
    return replace(plan, units=tuple(units))


def by_option(launches: Launches, chosen: Sequence[Option]) -> Draft:
    """The launches with a message for every option that their tensors have."""

    def messages(launch: Sequence[int]) -> LaunchDraft:
        options = dict.fromkeys(chosen[tensor] for tensor in launch)
        return tuple(
            MessageDraft(tuple(tensor for tensor in launch if chosen[tensor] == option), option) for option in options
        )

    return tuple(map(messages, launches))


def _around(between: Program, levels: bool) -> Program:
    """The program between nodes, with sums inside a machine before, and their shards gathered afterwards."""
    return (ReduceScatter(Level.INTRA), *between, AllGather(Level.INTRA)) if levels else between


# -------------------------------------------------------------------- the cost model


class Exchange(Enum):
    """How the nodes of HiPress exchange a gradient."""

    SERVER = "server"  # parts go to the nodes that own them, and back
    RING = "ring"


@dataclass(frozen=True)
class Primitive:
    """The time of a primitive as a function of a number of fp32 elements."""

    fixed_s: float  # seconds for none
    each_s: float  # seconds for each element
    least_s: float = 0.0  # seconds for sizes at which the line is below it, if it is more than fixed_s

    def seconds(self, numel: Floats) -> Floats:
        """The time for each number of elements."""
        return np.maximum(self.fixed_s + self.each_s * numel, self.least_s)


@dataclass(frozen=True)
class SecopaCosts:
    """The primitives of a cluster. Encodings take raw elements, everything else what is sent, counted in fp32."""

    nodes: int  # number of nodes, at least 2
    encode: Primitive
    decode: Primitive
    gather: Primitive
    broadcast: Primitive
    hop: Primitive
    ratio: float  # bytes of a payload over bytes of the gradient

    def exact_s(self, numel: int, exchange: Exchange) -> Floats:
        """Seconds without compression in 1 to ``nodes`` parts."""
        return self._send_s(numel / self._parts, exchange)

    def compressed_s(self, numel: int, exchange: Exchange) -> Floats:
        """Seconds with compression in 1 to ``nodes`` parts."""
        parts, nodes = self._parts, self.nodes
        raw, sent = numel / parts, numel * self.ratio / parts
        if exchange == Exchange.SERVER:
            encodings, decodings = np.minimum(parts + 1, nodes), np.minimum(nodes - 1 + parts, 2 * (nodes - 1))
        else:
            encodings = decodings = np.full(nodes, float(nodes))
        codec_s = encodings * self.encode.seconds(raw) + decodings * self.decode.seconds(sent)
        return self._send_s(sent, exchange) + codec_s

    def _send_s(self, numel: Floats, exchange: Exchange) -> Floats:
        if exchange == Exchange.SERVER:
            return self.gather.seconds(numel) + self.broadcast.seconds(numel)
        return 2 * (self.nodes - 1) * self.hop.seconds(numel)

    @property
    def _parts(self) -> Floats:
        return np.arange(1.0, self.nodes + 1)


@dataclass(frozen=True)
class SecopaDecision:
    """SeCoPa's decision about a gradient."""

    compress: bool  # whether to compress it
    parts: int  # number of parts


def decide(numel: int, costs: SecopaCosts, exchange: Exchange) -> SecopaDecision:
    """The decision for a gradient of ``numel`` elements. Between equal numbers of parts it takes the smaller one."""
    exact_s, compressed_s = costs.exact_s(numel, exchange), costs.compressed_s(numel, exchange)
    compress = bool(exact_s.min() > compressed_s.min())
    return SecopaDecision(compress, 1 + int((compressed_s if compress else exact_s).argmin()))
