"""The policy ``hitopkcomm``: every tensor compressed on the device, once, between machines."""

from __future__ import annotations

from ...plans.plan import Plan
from ...programs.named import ALLGATHER
from ..drafts.drafts import Option, plan_of
from ..drafts.problem import Problem
from ..policies.messages import (
    GATHERED_BETWEEN_MACHINES,
    codecs,
    each_alone,
    fastest,
    has_levels,
    preselected,
    uniform_draft,
)
from ..policies.none import none


def hitopkcomm(problem: Problem) -> Plan:
    """The plan of HiTopKComm (Shi et al., 2021): gradients are added inside a machine, compressed shards are gathered
    between machines, and the shards of the mean inside a machine.

    Every tensor is a launch, or with DDP every bucket. The compressor with the fastest step is taken.
    Without compressors it is the plan of ``none``.
    """
    program = GATHERED_BETWEEN_MACHINES if has_levels(problem.topology) else ALLGATHER
    options = [Option(program, compressor) for compressor in codecs(problem)]
    drafts = [uniform_draft(problem, each_alone(problem), option) for option in options]
    plans = [plan_of(problem, drafts[at]) for at in preselected(problem, drafts)]
    return fastest(problem, plans) if plans else none(problem)
