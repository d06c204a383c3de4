"""The least time of a training step on a link.

A step on a link is forward, then backward or the wire, whichever takes longer, then the optimizer. Nothing can hide the
encoding of the first message and the decoding of the last, whose times are read off traced steps.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gckernels.sync import Topology


@dataclass(frozen=True)
class Alone:
    """Seconds of the parts of a step, each measured without the others.

    Attributes:
        forward_s, backward_s, optimizer_s: seconds of a step that DDP does not synchronise.
        ddp_backward_s: seconds of a backward with DDP's buckets and a hook that sends nothing.
        wire_s: seconds that the bytes of a step take at the goodput of the busiest link.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    ddp_backward_s: float
    wire_s: float

    def bound_s(self, encode_first_s: float = 0.0, decode_last_s: float = 0.0, with_ddp: bool = False) -> float:
        """Seconds of the shortest possible step; ``with_ddp`` counts the copies into and out of DDP's buckets."""
        hidden_s = max(self.ddp_backward_s if with_ddp else self.backward_s, self.wire_s)
        return self.forward_s + hidden_s + self.optimizer_s + encode_first_s + decode_last_s


@dataclass(frozen=True)
class Slice:
    """A stage that a rank has run in a traced step.

    Attributes:
        message: number of its message.
        stage: its number in the message.
        communicates: whether it is a collective; otherwise it computes or copies.
        start_s, end_s: when it started and ended.
        name: its name, such as ``"AllToAll(inter)"``.
        nbytes: bytes that a rank sends for it, as a mean over all ranks.
    """

    message: int
    stage: int
    communicates: bool
    start_s: float
    end_s: float
    name: str = ""
    nbytes: float = 0.0


def read_slices(path: Path) -> list[list[Slice]]:
    """The slices of a trace with one step, by rank."""
    ranks: dict[int, list[Slice]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            args, times = event["args"], (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            where = args["message"], args["stage"], event["cat"] == "communicate"
            ranks.setdefault(event["pid"], []).append(Slice(*where, *times, event["name"], args["bytes"]))
    return [ranks[rank] for rank in sorted(ranks)]


def encode_first_and_decode_last_s(traced: Iterable[Sequence[Slice]]) -> tuple[float, float]:
    """Seconds of computing before the first collective of the first message, and after the last one of the last.

    Args:
        traced: the slices of a step on a rank, of several ranks and steps. The result has medians over all that have a
            collective.
    """
    found = [_first_and_last(slices) for slices in traced if any(each.communicates for each in slices)]
    if not found:
        return 0.0, 0.0
    first, last = zip(*found, strict=True)
    return statistics.median(first), statistics.median(last)


def _first_and_last(slices: Sequence[Slice]) -> tuple[float, float]:
    messages: dict[int, list[Slice]] = {}
    for each in sorted(slices, key=lambda each: each.stage):
        messages.setdefault(each.message, []).append(each)
    first = messages[min(messages)]
    last = max(messages.values(), key=lambda stages: stages[-1].end_s)
    before = itertools.takewhile(lambda each: not each.communicates, first)
    after = itertools.takewhile(lambda each: not each.communicates, reversed(last))
    return _seconds(before), _seconds(after)


def _seconds(slices: Iterable[Slice]) -> float:
    return sum(each.end_s - each.start_s for each in slices)


def link_nbytes(slices: Sequence[Slice], topology: Topology) -> float:
    """Bytes of a step in one direction of the link of a machine, on which several ranks may be.

    Links inside machines are taken as free. A collective of all ranks is taken as a ring, which leaves every machine
    once; an all-to-all sends directly.

    Args:
        slices: the stages of one rank.
        topology: machines and ranks.
    """
    ranks, local = topology.world_size, topology.devices
    nbytes = 0.0
    for each in slices:
        if not each.communicates or "(intra)" in each.name:
            continue
        if "(inter)" in each.name:
            nbytes += local * each.nbytes
        elif each.name.startswith("AllToAll"):
            nbytes += local * each.nbytes * (ranks - local) / (ranks - 1)
        else:
            nbytes += each.nbytes
    return nbytes
