"""Options of messages: every program and compressor with which the tensors of a message may be sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.sync.programs.enumeration import enumerate_programs
from gckernels.sync.programs.layouts import Capabilities
from gckernels.sync.programs.named import ALLREDUCE, SHARDS, ring
from gckernels.sync.programs.spans import SHARD
from gckernels.sync.programs.steps import Coding, Encode, Place, Program

from .drafts import MAX_CHANNELS, Option
from .problem import Problem

PARTS = (1, 2, 4, 8)
"""The numbers of parts that searches try."""


def options_of(problem: Problem, compressor: Compressor | None) -> tuple[Option, ...]:
    """All options with a compressor, or without one, that compute on the device: one part, channel 0.

    A method that is no codec has one program, and so have all methods where the mean ends in shards. All others have
    those of the enumeration, in which payloads may be added if the compressor allows that, and the ring, if it can
    encode sums on their way.
    """
    topology = problem.topology
    if problem.frontend.span() == SHARD:
        return (Option(SHARDS, compressor),) if compressor is not None else (Option(), Option(SHARDS))
    if compressor is None:
        raw = (program for program in enumerate_programs(topology) if not _encodes(program))
        return tuple(map(Option, dict.fromkeys((ALLREDUCE, *raw))))
    if not isinstance(compressor, Codec):
        return (Option(problem.default_program(compressor), compressor),)
    programs = enumerate_programs(topology, summable=compressor.traits.summable)
    goes_around = topology.world_size > 2 and Capabilities.of(compressor).averages_sums
    rings = (ring(topology.world_size),) if goes_around else ()
    return tuple(Option(program, compressor) for program in (*programs, *rings) if _encodes(program))


def all_options(problem: Problem) -> tuple[Option, ...]:
    """All options on the device: first without compressor, of which the very first averages in place."""
    each = (options_of(problem, compressor) for compressor in (None, *problem.compressors))
    return tuple(itertools.chain.from_iterable(each))


def variants(option: Option) -> tuple[Option, ...]:
    """An option with every number of parts and every channel, itself first."""
    if option.in_place or not option.has_channels:
        return (option,)
    each = (replace(option, parts=parts, channel=channel) for parts in PARTS for channel in range(MAX_CHANNELS))
    return tuple(dict.fromkeys((option, *each)))


def placed(option: Option, places: Sequence[Place]) -> tuple[Option, ...]:
    """An option with each of its encodings and decodings at every place, itself first."""
    if option.in_place or not _encodes(option.program) or not isinstance(option.compressor, Codec):
        return (option,)
    choices = (
        [type(step)(place) for place in places] if isinstance(step, Coding) else [step] for step in option.program
    )
    return tuple(
        dict.fromkeys((option, *(replace(option, program=program) for program in itertools.product(*choices))))
    )


def _encodes(program: Program) -> bool:
    return any(isinstance(step, Encode) for step in program)
