"""Drafts of policies that use one option for all tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gckernels.codec import Codec

from ...plans.plan import Plan
from ...programs.named import ALLGATHER, HIERARCHICAL
from ...programs.steps import AllGather, Decode, Encode, Level, Program, ReduceScatter
from ...programs.topology import Topology
from ..drafts.drafts import Draft, LaunchDraft, Launches, MessageDraft, Option, carried
from ..drafts.problem import Problem
from ..search.search import Search

GATHERED_BETWEEN_MACHINES: Program = (
    ReduceScatter(Level.INTRA),
    Encode(),
    AllGather(Level.INTER),
    Decode(),
    AllGather(Level.INTRA),
)
"""Gradients are added inside a machine; payloads of the shards are gathered between machines."""

MAX_PARTS = 4096
"""The largest number of parts of all tensors of a plan. Each part is a message, whose prediction takes time and memory;
models of terabytes, or thousands of machines, would have millions."""

JUDGED = 2
"""Plans that the timeline judges, of those that a policy may make with different compressors."""


def has_levels(topology: Topology) -> bool:
    """Whether there are several machines with several devices."""
    return min(topology.machines, topology.devices) > 1


def each_alone(problem: Problem) -> Launches:
    """The launches with a tensor each; DDP's buckets where those are given."""
    return problem.buckets or tuple((tensor,) for tensor in range(len(problem.trace.tensors)))


def launch_of(problem: Problem, tensors: Sequence[int], option: Option) -> LaunchDraft:
    """The messages of a launch: one with the option, and one for large tensors that may not be compressed."""
    with_option, exact = carried(problem, tensors, option)
    messages = (MessageDraft(with_option, option), MessageDraft(exact))
    return tuple(message for message in messages if message.tensors)


def uniform_draft(problem: Problem, launches: Iterable[Sequence[int]], option: Option) -> Draft:
    """The draft with the same option for all launches."""
    return tuple(launch_of(problem, launch, option) for launch in launches)


def codecs(problem: Problem) -> tuple[Codec, ...]:
    """The allowed compressors that encode in one step, without those that compute between collectives."""
    return tuple(method for method in problem.compressors if isinstance(method, Codec))


def usual_programs(problem: Problem, compressor: Codec) -> tuple[Program, ...]:
    """The programs that systems with one program for all tensors use."""
    topology = problem.topology
    programs = [problem.default_program(compressor)]
    if not compressor.traits.summable:
        programs.append(ALLGATHER)
    if has_levels(topology):
        programs += [HIERARCHICAL, GATHERED_BETWEEN_MACHINES]
    return tuple(dict.fromkeys(programs))


def fastest(problem: Problem, plans: Iterable[Plan]) -> Plan:
    """The plan with the shortest step on the timeline; the first one of equals."""
    return min(plans, key=problem.step_s)


def preselected(problem: Problem, drafts: Sequence[Draft], count: int = JUDGED) -> list[int]:
    """The numbers of the drafts that are estimated to be the fastest, at most ``count``. The timeline judges them."""
    if len(drafts) <= count:
        return list(range(len(drafts)))
    times = Search(problem).estimates(drafts)
    return sorted(range(len(drafts)), key=times.__getitem__)[:count]
