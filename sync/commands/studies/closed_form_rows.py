"""The closed forms of the Utility paper beside the timeline, and why the two disagree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ...planner.drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from ...planner.drafts.problem import Problem
from ...planner.machines.machine import Machine, MachineError
from ...planner.machines.scaling import sending_bit_per_s
from ...planner.published.closed_forms import ClosedForm, RingLink, gathered, power_sgd, reduced, sync_sgd
from ...planner.timeline.pricing import Units
from ...planner.timeline.timeline import Timeline, timeline
from ...plans.names import short_spec
from ...plans.numbers import duration, plural
from ...programs.named import ALLGATHER, ENCODED_ALLREDUCE, default_program
from ...programs.stages import MessageKind, StageKind
from ...programs.steps import Level, Place, Program, ProgramError
from ...traces.traced_tensors import TracedTensor

AGREES = 0.10
"""The relative difference up to which closed form and timeline agree."""


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
    """A row without compression, and one for each allowed compressor, used wherever it is allowed."""
    if problem.topology.world_size == 1:
        return
    link = link_of(problem.machine)
    nbytes = float(sum(tensor.numel * tensor.dtype.itemsize for tensor in problem.trace.tensors))
    yield _row(problem, "none", sync_sgd(problem.trace.backward_s, nbytes, link), Option())
    for compressor in problem.compressors:
        try:
            yield _compressed(problem, compressor, link)
        except (MachineError, ProgramError):
            continue


def link_of(machine: Machine) -> RingLink:
    """The ring of equal links that closed forms know, with the prices of a machine's all-gather, which is one."""
    ranks = machine.topology.world_size
    first = machine.collective("AllGather", Level.FLAT, Place.DEVICE, np.array([1.0])).alone_s
    return RingLink(ranks, sending_bit_per_s(machine, "AllGather"), float(first[0]) / (ranks - 1))


def _compressed(problem: Problem, compressor: Compressor, link: RingLink) -> ClosedFormRow:
    trace, summable = problem.trace, compressor.traits.summable
    methods = [problem.fitted(number, compressor) for number in range(len(trace.tensors))]
    payload = float(sum(_sent_nbytes(method, tensor) for method, tensor in zip(methods, trace.tensors, strict=True)))
    if not isinstance(compressor, Codec):
        program = default_program(compressor, link.ranks)
        codec_s = _low_rank_s(problem, methods, program)
        form = _factors if compressor.rounds > 1 else reduced
    else:
        program = ENCODED_ALLREDUCE if summable else ALLGATHER
        codec_s = _codec_s(problem, methods, 1 if summable else link.ranks)
        form = reduced if summable else gathered
    closed = form(trace.backward_s, codec_s, payload, link)
    return _row(problem, short_spec(compressor), closed, Option(program, compressor))


def _factors(backward_s: float, codec_s: float, payload_nbytes: float, link: RingLink) -> ClosedForm:
    return power_sgd(backward_s, codec_s, payload_nbytes, 1.0, link)


def _sent_nbytes(method: Compressor, tensor: TracedTensor) -> int:
    """The bytes that a method makes of a tensor, in all of its rounds."""
    return sum(method.round_nbytes(tensor.numel, index) for index in range(method.rounds))


def _low_rank_s(problem: Problem, methods: Sequence[Compressor], program: Program) -> float:
    """Seconds of computing in one message of all matrices."""
    tensors, numels = problem.trace.tensors, dict[Compressor, list[int]]()
    for method, tensor in zip(methods, tensors, strict=True):
        if not isinstance(method, Identity):
            numels.setdefault(method, []).append(tensor.numel)
    units = [Units.of(method, [each]) for method, each in numels.items()]
    if not units:
        return 0.0
    (stages,) = problem.pricer.table(MessageKind.LOW_RANK, (program,), units, tensors[0].dtype)
    return sum(float(stage.price.alone_s[0]) for stage in stages if stage.spec.resource.does != "communicate")


def _codec_s(problem: Problem, methods: list[Compressor], sources: int) -> float:
    """Seconds of encoding and decoding everything in one launch of each."""
    compressed = [
        (method, tensor.numel)
        for method, tensor in zip(methods, problem.trace.tensors, strict=True)
        if not isinstance(method, Identity)
    ]
    if not compressed:
        return 0.0
    units, elements = np.array([float(len(compressed))]), np.array([float(sum(numel for _, numel in compressed))])
    prices = (
        problem.machine.codec(work, compressed[0][0], Place.DEVICE, units, elements, merged)
        for work, merged in ((StageKind.ENCODE, 1), (StageKind.DECODE, sources))
    )
    return float(sum(price.alone_s[0] for price in prices))


def _row(problem: Problem, name: str, closed: ClosedForm, option: Option) -> ClosedFormRow:
    plan = plan_of(problem, draft_of_launches(usual_launches(problem), option))
    found = timeline(plan, problem.trace, problem.pricer, problem.frontend)
    row = ClosedFormRow(name, closed, found.backward_s + found.exposed_s, "")
    if abs(row.difference) <= AGREES:
        return row
    return ClosedFormRow(name, closed, row.timeline_s, _why(closed, found))


def _why(closed: ClosedForm, found: Timeline) -> str:
    """The part of the step in which closed form and timeline differ by most time, as a sentence.

    Both are the sum of backward, codecs and communication, less all that is hidden, so the differences of these parts
    add up to the whole.
    """
    seconds = {"compute": 0.0, "communicate": 0.0, "copy": 0.0}
    for stage in found.stages:
        seconds[stage.spec.resource.does] += stage.end_s - stage.start_s
    codec_s, sending_s = seconds["compute"] + seconds["copy"], seconds["communicate"]
    hidden_s = codec_s + sending_s - found.exposed_s
    differences = {
        "hidden": hidden_s - closed.hidden_s,
        "communicate": closed.communicate_s - sending_s,
        "codec": closed.codec_s - codec_s,
        "compute": closed.compute_s - found.backward_s,
    }
    part = max(differences, key=lambda each: abs(differences[each]))
    messages = plural(len({stage.message for stage in found.stages}), "message")
    match part:
        case "hidden":
            return (
                f"the timeline hides {duration(max(hidden_s, 0.0))} of encoding and sending under backward and "
                f"under one another, the closed form {duration(closed.hidden_s)}"
            )
        case "communicate":
            return (
                f"{messages} take {duration(sending_s)} to send on the timeline, with latencies and links inside "
                f"machines; a ring of equal links takes {duration(closed.communicate_s)}"
            )
        case "codec":
            return (
                f"codecs of {messages} take {duration(codec_s)} on the timeline, one launch for all takes "
                f"{duration(closed.codec_s)}"
            )
    return f"backward takes {duration(found.backward_s)} on the timeline, {duration(closed.compute_s)} in the form"
