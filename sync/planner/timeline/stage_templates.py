"""Skeletons: the stages of programs with what each needs, before anything is known of the units of a message.

Programs have many stages in common. Each distinct need has a number, so that it is priced once for all programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ...programs.layouts import Capabilities, Content, Extent, Layout, propagate
from ...programs.sizes import sent_content
from ...programs.stages import MessageKind, Resource, StageKind, StageSpec, levels_of_root, stages_of
from ...programs.steps import Broadcast, Collective, Gather, Level, Place, Program, Reduce
from ...programs.topology import Topology


class Sending(NamedTuple):
    """A collective.

    Attributes:
        step: the name of its step.
        level: its level.
        place: the place of the data.
        from_roots: whether one device of each machine has all data of the machine, and takes part alone.
        sent: for units of each kind, the content that is sent, and how many times.
    """

    step: str
    level: Level
    place: Place
    from_roots: bool
    sent: tuple[tuple[Content, float], ...]


class Copying(NamedTuple):
    """A copy.

    Attributes:
        resource: the copy engine; ``None`` for copies where backward computes.
        contents: for units of each kind, what is copied.
        at_most: likewise; no more than that is copied, if it is there.
    """

    resource: Resource | None
    contents: tuple[Content, ...]
    at_most: tuple[Content, ...] = ()


class Coding(NamedTuple):
    """An encoding or decoding.

    Attributes:
        kind: the work.
        place: where it is computed.
        extents: for units of each kind, the elements.
        sources: the number of payloads that are merged.
    """

    kind: StageKind
    place: Place
    extents: tuple[Extent, ...]
    sources: int


Need: TypeAlias = Sending | Copying | Coding


class Roots(NamedTuple):
    """The dependence of a stage on the root of its message, as levels on which the root's index counts.

    Attributes:
        ranks: the ranks that have this index take part, and no others; all ranks if there is no level.
        link: the link of the rank that has this index is the one with the most to carry.
    """

    ranks: tuple[Level, ...] = ()
    link: tuple[Level, ...] = ()


NO_ROOTS = Roots()
"""No dependence: the stage is the same whatever rank is the root."""


class Skeleton(NamedTuple):
    """The stages of a program.

    Attributes:
        specs: the stages.
        needs: for each stage the number of its need.
        roots: for each stage its dependence on the root.
    """

    specs: tuple[StageSpec, ...]
    needs: tuple[int, ...]
    roots: tuple[Roots, ...]


class Skeletons:
    """The skeletons of programs for messages of one kind.

    Args:
        kind: the kind of the messages.
        capabilities: the capabilities of the units of each kind; the first ones decide the stages.
        topology: the topology of the ranks.
        apart: as for :func:`~gckernels.sync.programs.stages.stages_of`.

    Attributes:
        needs: all needs so far, by number.
    """

    def __init__(
        self,
        kind: MessageKind,
        capabilities: Sequence[Capabilities],
        topology: Topology,
        apart: bool,
    ) -> None:
        self._kind, self._capabilities, self._topology = kind, capabilities, topology
        self._apart = apart
        self.needs: list[Need] = []
        self._numbers: dict[Need, int] = {}
        self._known: dict[Program, Skeleton] = {}

    def of(self, program: Program) -> Skeleton:
        """The skeleton of a program. It is kept."""
        if program not in self._known:
            specs = stages_of(self._kind, program, self._capabilities[0], self._topology, self._apart)
            layouts = [propagate(program, each, self._topology) for each in self._capabilities]
            roots = tuple(_roots(spec, program, layouts[0]) for spec in specs)
            needs = (
                _need(spec, program, layouts, each, self._topology) for spec, each in zip(specs, roots, strict=True)
            )
            self._known[program] = Skeleton(specs, tuple(map(self._number, needs)), roots)
        return self._known[program]

    def _number(self, need: Need) -> int:
        if need not in self._numbers:
            self._numbers[need] = len(self.needs)
            self.needs.append(need)
        return self._numbers[need]


@functools.lru_cache(maxsize=256)
def skeletons_for(
    kind: MessageKind,
    capabilities: tuple[Capabilities, ...],
    topology: Topology,
    apart: bool,
) -> Skeletons:
    """The skeletons for messages of one kind; the arguments are those of :class:`Skeletons`."""
    return Skeletons(kind, capabilities, topology, apart)


def _roots(spec: StageSpec, program: Program, layouts: tuple[Layout, ...]) -> Roots:
    """The dependence of a stage on the root."""
    ranks = levels_of_root(spec, program, layouts)
    if spec.level is None:
        return Roots(ranks)
    has_root = isinstance(program[spec.first], Gather | Reduce | Broadcast)
    return Roots(ranks, (*ranks, *((spec.level,) if has_root else ())))


def _need(
    spec: StageSpec, program: Program, layouts: Sequence[tuple[Layout, ...]], roots: Roots, topology: Topology
) -> Need:
    """The need of a stage.

    Args:
        spec: the stage.
        program: its program.
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
