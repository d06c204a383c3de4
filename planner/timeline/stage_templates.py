"""Templates: the stages of programs with the operation of each, before anything is known of the units of a message."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from gckernels.sync.programs.layouts import Capabilities, Content, Extent, Layout, propagate
from gckernels.sync.programs.sizes import sent_content
from gckernels.sync.programs.spans import MEAN, Span
from gckernels.sync.programs.stages import MessageKind, Resource, StageKind, StageSpec, levels_of_root, stages_of
from gckernels.sync.programs.steps import Broadcast, Collective, Gather, Level, Place, Program, Reduce
from gckernels.sync.programs.topology import Topology


class Sending(NamedTuple):
    """A collective."""

    step: str  # the name of its step
    level: Level
    place: Place  # the place of the data
    from_roots: bool  # whether one device of each machine has all data of the machine, and takes part alone
    sent: tuple[tuple[Content, float], ...]  # for units of each kind, the content that is sent, and how many times


class Copying(NamedTuple):
    """A copy."""

    resource: Resource | None  # the copy engine; None for copies where backward computes
    contents: tuple[Content, ...]  # for units of each kind, what is copied
    at_most: tuple[Content, ...] = ()  # likewise; no more than that is copied, if it is there


class Coding(NamedTuple):
    """An encoding or decoding."""

    kind: StageKind  # the work
    place: Place  # where it is computed
    extents: tuple[Extent, ...]  # for units of each kind, the elements
    sources: int  # the number of payloads that are merged


Operation: TypeAlias = Sending | Copying | Coding
"""The operation of a stage. Equal ones are the same object, so that each is priced once for all programs."""


class Roots(NamedTuple):
    """The dependence of a stage on the root of its message, as levels on which the root's index counts."""

    ranks: tuple[Level, ...] = ()
    """The ranks that have this index take part, and no others; all ranks if there is no level."""
    link: tuple[Level, ...] = ()  # the link of the rank that has this index is the one with the most to carry


NO_ROOTS = Roots()
"""No dependence: the stage is the same whatever rank is the root."""


class StageTemplate(NamedTuple):
    """A stage of a program."""

    spec: StageSpec
    operation: Operation
    roots: Roots  # its dependence on the root


_OPERATIONS: dict[Operation, Operation] = {}
"""The operations of all templates."""


@functools.lru_cache(maxsize=20000)
def templates_of(
    kind: MessageKind,
    program: Program,
    capabilities: tuple[Capabilities, ...],
    topology: Topology,
    apart: bool,
    span: Span = MEAN,
) -> tuple[StageTemplate, ...]:
    """The stages of a program for messages of one kind. Results are kept.

    Args:
        capabilities: the capabilities of the units of each kind; the first ones decide the stages.
        topology: the topology of the ranks.
        apart, span: as for :func:`~gckernels.sync.programs.stages.stages_of`.
    """
    span = MEAN if kind == MessageKind.IN_PLACE else span  # FSDP2 reduces these to shards itself
    layouts = [propagate(program, each, topology, span) for each in capabilities]
    templates = []
    for spec in stages_of(kind, program, capabilities[0], topology, apart, span):
        roots = _roots(spec, program, layouts[0])
        operation = _operation(spec, program, layouts, roots, topology)
        templates.append(StageTemplate(spec, _OPERATIONS.setdefault(operation, operation), roots))
    return tuple(templates)


def _roots(spec: StageSpec, program: Program, layouts: tuple[Layout, ...]) -> Roots:
    """The dependence of a stage on the root."""
    ranks = levels_of_root(spec, program, layouts)
    if spec.level is None:
        return Roots(ranks)
    has_root = isinstance(program[spec.first], Gather | Reduce | Broadcast)
    return Roots(ranks, (*ranks, *((spec.level,) if has_root else ())))


def _operation(
    spec: StageSpec, program: Program, layouts: Sequence[tuple[Layout, ...]], roots: Roots, topology: Topology
) -> Operation:
    """The operation of a stage.

    Args:
        layouts: for units of each kind, the layouts of the program.
        roots: the dependence of the stage on the root.
        topology: the topology of the ranks.
    """
    before, after = [each[spec.first] for each in layouts], [each[spec.stop] for each in layouts]
    match spec.kind:
        case StageKind.COLLECTIVE | StageKind.AVERAGE:
            step = program[spec.first]
            assert isinstance(step, Collective)
            sent = tuple(sent_content(step, *pair, topology) for pair in zip(before, after, strict=True))
            return Sending(type(step).__name__, step.level, spec.place, Level.INTRA in roots.ranks, sent)
        case StageKind.COPY:
            return Copying(spec.resource, tuple(each.content for each in before))
        case StageKind.CUT:  # the share that is sent, which may also be all that there is
            return Copying(None, tuple(each.content for each in after), tuple(each.content for each in before))
        case StageKind.JOIN:
            return Copying(None, tuple(each.content for each in after))
    at, merges = _encoded_state(spec)
    extents = tuple(each[at].piece for each in layouts)
    return Coding(spec.kind, spec.place, extents, before[0].sources if merges else 1)


def _encoded_state(spec: StageSpec) -> tuple[int, bool]:
    """The number of steps before the state whose elements a stage encodes or decodes, and whether it merges sources."""
    match spec.kind:
        case StageKind.DECODE | StageKind.RECONSTRUCT:
            return spec.stop, True
        case StageKind.RECODE:
            return spec.first + 1, True
        case StageKind.ENCODE_SHARD:
            return spec.stop, False
    return spec.first, False
