"""Drafts and options of systems that use one compressor and one program for all tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gckernels.codec import Codec
from gckernels.sync.programs.named import ALLGATHER, HIERARCHICAL
from gckernels.sync.programs.steps import AllGather, Decode, Encode, Level, Program, ReduceScatter
from gckernels.sync.programs.topology import Topology

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


def uniform_draft(problem: Problem, launches: Iterable[Sequence[int]], option: Option) -> Draft:
    """The draft with the same option for all launches. Large tensors that may not be compressed have messages apart."""

    def messages(launch: Sequence[int]) -> LaunchDraft:
        with_option, exact = carried(problem, launch, option)
        both = (MessageDraft(with_option, option), MessageDraft(exact))
        return tuple(message for message in both if message.tensors)

    return tuple(map(messages, launches))


def codecs(problem: Problem) -> tuple[Codec, ...]:
    """The allowed compressors that encode in one step, without those that compute between collectives."""
    return tuple(method for method in problem.compressors if isinstance(method, Codec))


def usual_programs(problem: Problem, compressor: Codec) -> tuple[Program, ...]:
    """The programs that systems with one program for all tensors use."""
    programs = [problem.default_program(compressor)]
    if not compressor.traits.summable:
        programs.append(ALLGATHER)
    if has_levels(problem.topology):
        programs += [HIERARCHICAL, GATHERED_BETWEEN_MACHINES]
    return tuple(dict.fromkeys(programs))


def usual_options(problem: Problem) -> list[Option]:
    """Every allowed compressor with each of its usual programs."""
    return [
        Option(program, compressor) for compressor in codecs(problem) for program in usual_programs(problem, compressor)
    ]


def preselected(problem: Problem, drafts: Sequence[Draft]) -> list[int]:
    """The numbers of the drafts that are estimated to be the fastest, at most :data:`JUDGED`."""
    if len(drafts) <= JUDGED:
        return list(range(len(drafts)))
    times = Search(problem).estimates(drafts)
    return sorted(range(len(drafts)), key=times.__getitem__)[:JUDGED]
