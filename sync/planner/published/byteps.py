"""The policy ``byteps``: every tensor compressed by the processors of the machines."""

from __future__ import annotations

from ...plans.plan import Plan
from ...programs.named import ALLTOALL, HIERARCHICAL
from ...programs.steps import Place
from ..drafts.drafts import MessageDraft, Option, plan_of
from ..drafts.problem import Problem
from ..machines.machine import Shared
from ..policies.messages import MAX_PARTS, codecs, each_alone, fastest, has_levels, preselected, uniform_draft
from ..policies.none import none
from .espresso import on_host

PART_NBYTES = 4096000
"""The largest part of a tensor that BytePS sends at once, by default."""


def byteps(problem: Problem) -> Plan:
    """The plan of BytePS with compression (Zhong et al., 2021): a two-level push and pull.

    Gradients are added inside a machine. The host encodes them and pushes each part to the machine that owns it, where
    the host decodes, adds and encodes again; all machines pull the result. Every tensor is a launch, cut into parts,
    which are larger for models of more than 16 GB. With DDP every bucket is a launch. If the problem does not have the
    host, or if the processors are the device, the device does the work of the host. Without compression BytePS is like
    ``none``.

    The compressor with the fastest step is taken. Without compressors it is the plan of ``none``.
    """
    program = HIERARCHICAL if has_levels(problem.topology) else ALLTOALL
    if Place.HOST in problem.places and problem.machine.computes_on != Shared.CORES:
        program = on_host(program)
    whole = [uniform_draft(problem, each_alone(problem), Option(program, each)) for each in codecs(problem)]
    drafts = [whole[at] for at in preselected(problem, whole)]
    nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in problem.trace.tensors)
    part_nbytes = max(PART_NBYTES, -(-nbytes // MAX_PARTS))
    plans = [
        plan_of(problem, tuple(tuple(_cut(problem, each, part_nbytes) for each in launch) for launch in draft))
        for draft in drafts
    ]
    return fastest(problem, plans) if plans else none(problem)


def _cut(problem: Problem, message: MessageDraft, part_nbytes: int) -> MessageDraft:
    """The message in parts, if it has a single tensor and is not averaged in place."""
    if len(message.tensors) > 1 or message.option.in_place:
        return message
    tensor = problem.trace.tensors[message.tensors[0]]
    parts = max(1, -(-tensor.numel * tensor.dtype.itemsize // part_nbytes))
    return MessageDraft(message.tensors, Option(message.option.program, message.option.compressor, parts))
