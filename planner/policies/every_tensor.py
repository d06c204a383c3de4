"""The policies ``byteps`` and ``hitopkcomm``, which compress every tensor in the same way, by host or by device."""

from __future__ import annotations

from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.named import ALLGATHER, ALLTOALL, HIERARCHICAL
from gckernels.sync.programs.steps import Place, Program

from ..drafts.drafts import Draft, MessageDraft, Option, plan_of
from ..drafts.problem import Problem
from ..machines.machine import Shared
from .baselines import fastest
from .espresso import on_host
from .messages import (
    GATHERED_BETWEEN_MACHINES,
    MAX_PARTS,
    codecs,
    each_alone,
    has_levels,
    preselected,
    uniform_draft,
)

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
    part_nbytes = max(PART_NBYTES, -(-problem.trace.nbytes // MAX_PARTS))
    drafts = (
        tuple(tuple(_cut(problem, each, part_nbytes) for each in launch) for launch in draft)
        for draft in _drafts(problem, program)
    )
    return fastest(problem, [plan_of(problem, draft) for draft in drafts])


def hitopkcomm(problem: Problem) -> Plan:
    """The plan of HiTopKComm (Shi et al., 2021): gradients are added inside a machine, compressed shards are gathered
    between machines, and the shards of the mean inside a machine.

    Every tensor is a launch, or with DDP every bucket. The compressor with the fastest step is taken.
    Without compressors it is the plan of ``none``.
    """
    program = GATHERED_BETWEEN_MACHINES if has_levels(problem.topology) else ALLGATHER
    return fastest(problem, [plan_of(problem, draft) for draft in _drafts(problem, program)])


def _drafts(problem: Problem, program: Program) -> list[Draft]:
    """The drafts of every tensor alone, with the compressors that are estimated to be the fastest."""
    drafts = [uniform_draft(problem, each_alone(problem), Option(program, each)) for each in codecs(problem)]
    return [drafts[at] for at in preselected(problem, drafts)]


def _cut(problem: Problem, message: MessageDraft, part_nbytes: int) -> MessageDraft:
    """The message in parts, if it has a single tensor and is not averaged in place."""
    if len(message.tensors) > 1 or message.option.in_place:
        return message
    parts = max(1, -(-problem.trace.tensors[message.tensors[0]].nbytes // part_nbytes))
    return MessageDraft(message.tensors, Option(message.option.program, message.option.compressor, parts))
