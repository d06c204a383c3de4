"""The least time of a training step on a link, and where a traced step spends the rest.

A step on a link is forward, then backward or the wire, whichever takes longer, then the optimizer. Nothing can hide the
encoding of the first message and the decoding of the last. The rest of a traced step is cut at the stages of its trace
into the columns of :class:`Rest`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.arms import Ticks
from bench.lib.spans import Interval, common, length, outside, union
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
    """A stage that has run. Times are in seconds.

    Attributes:
        message: number of its message.
        stage: its number in the message.
        communicates: whether it is a collective; otherwise it computes or copies.
        submitted, start, end: when its message was submitted, and when it started and ended.
        name: its name, such as ``"AllToAll(inter)"``.
        nbytes: bytes that a rank sends for it, as a mean over all ranks.
    """

    message: int
    stage: int
    communicates: bool
    submitted: float
    start: float
    end: float
    name: str = ""
    nbytes: float = 0.0

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Step:
    """A traced step of one rank. Times are in seconds of a clock that all ranks share.

    Attributes:
        begin, backward, averaged, end: when the step began, its backward began and ended, and the step ended.
        slices: its stages.
    """

    begin: float
    backward: float
    averaged: float
    end: float
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Rest:
    """Where a step spends its time beyond the bound, in seconds; the sum of all ``rest`` fields is ``rest_s``.

    Attributes:
        encode_first_s: encoding of the first message.
        decode_last_s: decoding of the message that ends last.
        traced_s: the step, which is traced.
        rest_s: the step minus its bound.
        rest_of_computing_s: forward and optimizer, beyond those of a step that sends nothing.
        rest_of_gradients_s: the wire is idle and no message is on its way, because backward has not finished any
            gradients; beyond the time by which backward alone takes longer than the wire.
        rest_of_encoding_s: the wire is idle and a message is encoded or encoded again; beyond ``encode_first_s``.
        rest_of_threads_s: the wire is idle, a message is on its way, and nothing is done for it.
        rest_of_ranks_s: a collective waits for ranks that have not begun it.
        rest_of_wire_s: collectives run, beyond the time that their bytes take.
        rest_of_ending_s: after the last collective until backward returns, beyond ``decode_last_s``.
        codec_s: total time of all stages that compute.
        last_submitted_s: from the begin of backward until the last message was submitted.
    """

    encode_first_s: float
    decode_last_s: float
    traced_s: float
    rest_s: float
    rest_of_computing_s: float
    rest_of_gradients_s: float
    rest_of_encoding_s: float
    rest_of_threads_s: float
    rest_of_ranks_s: float
    rest_of_wire_s: float
    rest_of_ending_s: float
    codec_s: float
    last_submitted_s: float


def rest_of(steps: Sequence[Step], alone: Alone) -> Rest | None:
    """Where the slowest rank spends a step; ``None`` if its trace has no collective.

    Args:
        steps: the same step on every rank.
        alone: the parts of the step, each measured without the others.
    """
    step = max(steps, key=lambda step: step.end - step.begin)
    sending = [each for each in step.slices if each.communicates]
    if not sending:
        return None
    began = {each: _begun_by_all(each, steps) for each in sending}
    last = max(sending, key=lambda each: each.end)
    exchange = [(step.backward, max(step.backward, last.end))]
    wire = common(union((began[each], each.end) for each in sending), exchange)
    busy = common(union(each.interval for each in sending), exchange)
    idle = outside(busy, exchange)
    ends = {key: max(each.end for each in group) for key, group in _by_message(sending)}
    pending = union((each.submitted, max(each.submitted, ends[each.message])) for each in sending)
    computing = [each for each in step.slices if not each.communicates]
    encoding = union(each.interval for each in computing if each.end <= ends.get(each.message, 0.0))
    waiting = common(idle, pending)
    encode_first_s, decode_last_s = _first_and_last(step.slices)
    encoding_s, gradients_s = length(common(waiting, encoding)), length(outside(pending, idle))
    wire_s, ending_s = length(wire), step.averaged - exchange[0][1]
    computing_s = step.backward - step.begin + step.end - step.averaged
    return Rest(
        encode_first_s=encode_first_s,
        decode_last_s=decode_last_s,
        traced_s=step.end - step.begin,
        rest_s=step.end - step.begin - alone.bound_s(encode_first_s, decode_last_s),
        rest_of_computing_s=computing_s - alone.forward_s - alone.optimizer_s,
        rest_of_gradients_s=gradients_s - max(alone.backward_s - alone.wire_s, 0.0),
        rest_of_encoding_s=encoding_s - encode_first_s,
        rest_of_threads_s=length(waiting) - encoding_s,
        rest_of_ranks_s=length(busy) - wire_s,
        rest_of_wire_s=wire_s - alone.wire_s,
        rest_of_ending_s=ending_s - decode_last_s,
        codec_s=codec_s(step.slices),
        last_submitted_s=max(each.submitted for each in step.slices) - step.backward,
    )


def codec_s(slices: Iterable[Slice]) -> float:
    """Total seconds of all stages that compute."""
    return sum(each.end - each.start for each in slices if not each.communicates)


def _begun_by_all(slice_: Slice, steps: Sequence[Step]) -> float:
    """When the last rank began the same collective; not after the end on this rank, which may not need that rank."""
    key = (slice_.message, slice_.stage)
    starts = [each.start for step in steps for each in step.slices if (each.message, each.stage) == key]
    return min(max(starts), slice_.end)


def _by_message(slices: Iterable[Slice]) -> Iterable[tuple[int, list[Slice]]]:
    by_message: dict[int, list[Slice]] = {}
    for each in slices:
        by_message.setdefault(each.message, []).append(each)
    return by_message.items()


def _first_and_last(slices: Sequence[Slice]) -> tuple[float, float]:
    """Seconds of computing before the first collective of the first message, and after the last one of the last."""
    messages = {number: sorted(group, key=lambda each: each.stage) for number, group in _by_message(slices)}
    first = messages[min(messages)]
    last = max(messages.values(), key=lambda group: group[-1].end)
    before = itertools.takewhile(lambda each: not each.communicates, first)
    after = itertools.takewhile(lambda each: not each.communicates, reversed(last))
    return codec_s(before), codec_s(after)


# -------------------------------------------------------------------- bytes on the busiest link


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


# -------------------------------------------------------------------- traces


def read_steps(path: Path, ticks: Sequence[Ticks]) -> list[Step]:
    """The steps of a trace with one step, by rank, given the ticks of each rank."""
    content = json.loads(path.read_text())
    clock = content["otherData"]
    slices: list[list[Any]] = [[] for _ in ticks]
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            args, communicates = event["args"], event["cat"] == "communicate"
            start = min(event["ts"], args.get("begun_us", event["ts"]))
            times = (args["submitted_us"] / 1e6, start / 1e6, (event["ts"] + event["dur"]) / 1e6)
            slices[event["pid"]].append(
                Slice(args["message"], args["stage"], communicates, *times, event["name"], args["bytes"])
            )
    steps = []
    for rank, each in enumerate(ticks):
        shift = clock["anchor_ns"][f"rank {rank}"] - clock["started_ns"]
        begin, backward, averaged, end = ((tick + shift) / 1e9 for tick in each)
        steps.append(Step(begin, backward, averaged, end, tuple(slices[rank])))
    return steps
