"""The closed forms of the Utility paper beside the timeline, and why the two disagree: a table.

    python -m bench.planner.closed_forms vgg16 utility-p3-8xlarge
    python -m bench.planner.closed_forms bert espresso-pcie --compressors "PowerSGD(rank=2)" EFSignSGD

A closed form is the time of a step from a handful of numbers (Agarwal et al., "On the Utility of Gradient Compression
in Distributed Training Systems", MLSys 2022). Gradients without compression are averaged in buckets beside backward.
Compressed gradients are encoded after backward, sent, and decoded: nothing overlaps, because encoding beside backward
was measured to be slower. Sizes are in bytes, bandwidths in bits per second, as links are sold.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.lib.program import program_parser
from gckernels.codec import Codec
from gckernels.compressor import Compressor, from_spec
from gckernels.ops import Identity
from gckernels.planner.commands.common.tables import table
from gckernels.planner.drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.machines.machine import Machine, MachineError
from gckernels.planner.machines.scaling import sending_bit_per_s
from gckernels.planner.timeline.pricing import Pricer, Units
from gckernels.planner.timeline.timeline import Timeline
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.plans.names import short_spec
from gckernels.sync.plans.numbers import duration, plural
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.named import ALLGATHER, ENCODED_ALLREDUCE, default_program
from gckernels.sync.programs.stages import MessageKind, StageKind
from gckernels.sync.programs.steps import Level, Place, Program, ProgramError
from gckernels.sync.traces.model_trace import ModelTrace

AGREES = 0.10
"""The relative difference up to which closed form and timeline agree."""
BUCKET_NBYTES = 25e6
"""Bytes of a bucket of gradients; those of the paper are decimal."""
OVERLAP_SLOWDOWN = 1.07
"""How much longer backward takes beside communication; the paper has measured 1.04 to 1.1."""


@dataclass(frozen=True)
class RingLink:
    """Ranks around a ring of equal links.

    Attributes:
        ranks: their number.
        bandwidth_bit_per_s: the bandwidth of each link, in one direction.
        latency_s: seconds for each of the ``ranks - 1`` rounds of a collective.
    """

    ranks: int
    bandwidth_bit_per_s: float
    latency_s: float = 0.0

    def allreduce_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce of ``nbytes`` bytes around the ring."""
        return self._rounds_s + 8 * 2 * nbytes * (self.ranks - 1) / (self.ranks * self.bandwidth_bit_per_s)

    def allgather_s(self, nbytes: float) -> float:
        """Seconds of an all-gather to which each rank gives ``nbytes`` bytes."""
        return self._rounds_s + 8 * nbytes * (self.ranks - 1) / self.bandwidth_bit_per_s

    @property
    def _rounds_s(self) -> float:
        return self.latency_s * (self.ranks - 1)


@dataclass(frozen=True)
class ClosedForm:
    """The time of backward and synchronisation of a step, in parts. All times are in seconds.

    Attributes:
        compute_s: backward, slowed down by what runs beside it.
        codec_s: encoding and decoding.
        communicate_s: all collectives, one after the other.
        hidden_s: the part of communication that overlaps with backward.
    """

    compute_s: float
    codec_s: float
    communicate_s: float
    hidden_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds from the start of backward until all gradients are averaged."""
        return self.compute_s + self.codec_s + self.communicate_s - self.hidden_s


def sync_sgd(backward_s: float, nbytes: float, link: RingLink, slowdown: float = OVERLAP_SLOWDOWN) -> ClosedForm:
    """The time without compression: all buckets but the last one are averaged beside backward.

    Args:
        backward_s: seconds of backward alone.
        nbytes: bytes of all gradients; the last bucket has the rest.
        link: the links.
        slowdown: the factor by which communication lengthens backward.
    """
    buckets = max(math.ceil(nbytes / BUCKET_NBYTES), 1)
    beside_s = (buckets - 1) * link.allreduce_s(BUCKET_NBYTES)
    last_s = link.allreduce_s(nbytes - (buckets - 1) * BUCKET_NBYTES)
    compute_s = slowdown * backward_s
    return ClosedForm(compute_s, 0.0, beside_s + last_s, min(compute_s, beside_s))


@dataclass(frozen=True)
class ClosedFormRow:
    """A closed form and the timeline of the same plan. All times are in seconds.

    Attributes:
        name: ``"none"``, or the spec of the compressor of all tensors.
        closed: the closed form: backward and synchronisation.
        timeline_s: the same on the timeline.
        why: the largest reason for the difference; ``""`` where they agree.
    """

    name: str
    closed: ClosedForm
    timeline_s: float
    why: str

    @property
    def difference(self) -> float:
        """How much longer the closed form says that it takes, relative to the timeline."""
        return self.closed.step_s / self.timeline_s - 1.0 if self.timeline_s else 0.0


def closed_form_rows(problem: Problem) -> Iterator[ClosedFormRow]:
    """A row without compression, and one for each allowed compressor, used wherever it is allowed. The problem is of a
    bare module or DDP on several ranks, because there is no form for models of FSDP2, and none for updates."""
    link = ring_of(problem.machine)
    trace = problem.trace
    yield _row(problem, "none", sync_sgd(trace.backward_s, float(trace.nbytes), link), Option())
    for compressor in problem.compressors:
        try:
            yield _compressed(problem, compressor, link)
        except (MachineError, ProgramError):
            continue


def ring_of(machine: Machine) -> RingLink:
    """The ring of equal links that closed forms know, with the prices of a machine's all-gather, which is one."""
    ranks = machine.topology.world_size
    first = machine.collective("AllGather", Level.FLAT, Place.DEVICE, np.array([1.0])).alone_s
    return RingLink(ranks, sending_bit_per_s(machine, "AllGather"), float(first[0]) / (ranks - 1))


def _compressed(problem: Problem, compressor: Compressor, link: RingLink) -> ClosedFormRow:
    trace = problem.trace
    methods = [problem.fitted(number, compressor) for number in range(len(trace.tensors))]
    pairs = list(zip(methods, trace.tensors, strict=True))
    sent = float(
        sum(method.round_nbytes(each.numel, index) for method, each in pairs for index in range(method.rounds))
    )
    numels = dict[Compressor, list[int]]()
    for method, tensor in pairs:
        if not isinstance(method, Identity):
            numels.setdefault(method, []).append(tensor.numel)
    if not isinstance(compressor, Codec):
        program = default_program(compressor, link.ranks)
        codec_s = _low_rank_s(problem, numels, program)
    else:
        program = ENCODED_ALLREDUCE if compressor.traits.summable else ALLGATHER
        codec_s = _codec_s(problem, numels, 1 if compressor.traits.summable else link.ranks)
    rounds = compressor.rounds  # the factors of PowerSGD are reduced one after the other
    sending_s = link.allgather_s(sent) if program == ALLGATHER else rounds * link.allreduce_s(sent / rounds)
    closed = ClosedForm(trace.backward_s, codec_s, sending_s)
    return _row(problem, short_spec(compressor), closed, Option(program, compressor))


def _low_rank_s(problem: Problem, numels: Mapping[Compressor, Sequence[int]], program: Program) -> float:
    """Seconds of computing in one message of all matrices."""
    units = [Units.of(method, [each]) for method, each in numels.items()]
    if not units:
        return 0.0
    stages = problem.pricer.stages(MessageKind.LOW_RANK, program, units, problem.dtype(0))
    return sum(float(stage.price.alone_s[0]) for stage in stages if stage.spec.resource.does != "communicate")


def _codec_s(problem: Problem, numels: Mapping[Compressor, Sequence[int]], sources: int) -> float:
    """Seconds of encoding and decoding everything in one launch of each."""
    if not numels:
        return 0.0
    method, everything = next(iter(numels)), [numel for each in numels.values() for numel in each]
    units, elements = np.array([float(len(everything))]), np.array([float(sum(everything))])
    prices = (
        problem.machine.codec(work, method, Place.DEVICE, units, elements, merged)
        for work, merged in ((StageKind.ENCODE, 1), (StageKind.DECODE, sources))
    )
    return float(sum(price.alone_s[0] for price in prices))


def _row(problem: Problem, name: str, closed: ClosedForm, option: Option) -> ClosedFormRow:
    plan = plan_of(problem, draft_of_launches(usual_launches(problem), option))
    found = problem.timeline(plan)
    row = ClosedFormRow(name, closed, found.backward_s + found.exposed_s, "")
    return row if abs(row.difference) <= AGREES else replace(row, why=_why(closed, found))


def _why(closed: ClosedForm, found: Timeline) -> str:
    """The part of the step in which closed form and timeline differ by most time, as a sentence.

    Both are the sum of backward, codecs and communication, less all that is hidden, so the differences of these parts
    add up to the whole.
    """
    seconds = {"compute": 0.0, "communicate": 0.0, "copy": 0.0}
    for stage in found.stages:
        seconds[stage.spec.resource.does] += stage.end_s - stage.start_s
    codec_s, sending_s = seconds["compute"] + seconds["copy"], seconds["communicate"]
    parts = {
        "encoding and sending that is hidden under backward": (closed.hidden_s, codec_s + sending_s - found.exposed_s),
        "sending, in all collectives": (closed.communicate_s, sending_s),
        "encoding and decoding": (closed.codec_s, codec_s),
        "backward": (closed.compute_s, found.backward_s),
    }
    part, (form_s, timeline_s) = max(parts.items(), key=lambda each: abs(each[1][0] - each[1][1]))
    messages = plural(len({stage.message for stage in found.stages}), "message")
    return f"{part}: {duration(max(timeline_s, 0.0))} on the timeline, in {messages}; {duration(form_s)} in the form"


def parse_args() -> argparse.Namespace:
    parser = program_parser(__doc__)
    parser.add_argument("trace", help="the name of a shipped trace, or a file")
    parser.add_argument("machine", help="the name of a shipped machine, or a file, with several ranks")
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help="by default those of the safe rule")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    trace, machine = ModelTrace.load(args.trace), load_machine(args.machine)
    rule = "safe" if args.compressors is None else [from_spec(spec) for spec in args.compressors]
    problem = Problem(trace, Pricer(machine), Frontend.MODULE, allowed_compressors(trace, rule))
    columns: dict[str, Callable[[ClosedFormRow], str]] = {
        "backward and sync": lambda row: row.name,
        "closed form": lambda row: duration(row.closed.step_s),
        "timeline": lambda row: duration(row.timeline_s),
        "differs": lambda row: f"{row.difference * 100:+.0f} %",
        "why": lambda row: row.why or "they agree",
    }
    print(table(closed_form_rows(problem), columns, left=(0, 4)))


if __name__ == "__main__":
    main()
