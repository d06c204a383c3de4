"""The stages of programs: their kinds, their lanes, and the ranks that take part."""

from __future__ import annotations

import pytest

from gckernels import BlockQuant, Cast16, Identity, PowerSGD
from gckernels.compressor import Compressor
from gckernels.sync import Topology
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    HIERARCHICAL,
    PARAMETER_SERVER,
    POWERSGD,
    Place,
    Program,
    ProgramError,
    enumerate_programs,
    ring,
)
from gckernels.sync.programs.layouts import Capabilities, propagate
from gckernels.sync.programs.residuals import ENCODINGS
from gckernels.sync.programs.rules import sites
from gckernels.sync.programs.stages import MessageKind, StageKind, StageSpec, stages_of, takes_part
from gckernels.sync.programs.steps import Collective, Encode, describe
from workloads import placed

EIGHT_BY_EIGHT = Topology(8, 8)
CODEC = Capabilities.of(BlockQuant())


def encoded(program: Program, topology: Topology = EIGHT_BY_EIGHT, **settings: bool) -> tuple[StageSpec, ...]:
    return stages_of(MessageKind.ENCODED, program, CODEC, topology, **settings)


def shown(specs: tuple[StageSpec, ...]) -> list[str]:
    return [f"{spec.name} {spec.resource.value}-{spec.phase}" for spec in specs]


# -------------------------------------------------------------------- some programs, checked by hand


def test_the_stages_of_two_phases():
    assert shown(encoded(ALLTOALL)) == [
        *("Encode compute-0", "AllToAll communicate-0", "Recode compute-1"),
        *("AllGather communicate-1", "Decode compute-2"),
    ]
    assert [spec.encoding for spec in encoded(ALLTOALL)] == ["worker", None, "shard", None, None]
    assert [(spec.first, spec.stop) for spec in encoded(ALLTOALL)] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]


def test_raw_data_is_cut_and_joined():
    assert shown(encoded(HIERARCHICAL)) == [
        *("Cut compute-0", "ReduceScatter(intra) communicate-0", "Encode compute-1", "AllToAll(inter) communicate-1"),
        *("Recode compute-2", "AllGather(inter) communicate-2", "Decode compute-3"),
        *("AllGather(intra) communicate-3", "Join compute-4"),
    ]


def test_a_ring():
    program = ring(3)
    specs = encoded(program, Topology(3))
    assert shown(specs) == [
        *("Encode compute-0", "Hop communicate-0", "Recode compute-1", "Hop communicate-1", "Recode compute-2"),
        *("AllGather communicate-2", "Decode compute-3"),
    ]
    assert [spec.kind for spec in specs][::2] == [
        StageKind.ENCODE_SHARD,
        StageKind.ADD,
        StageKind.ADD,
        StageKind.DECODE,
    ]
    assert {spec.encoding for spec in specs} == {"worker", None}


def test_copies_where_the_host_has_memory():
    program = placed(ALLGATHER, Place.HOST)
    assert shown(encoded(program)) == [
        *("Encode(host) compute-0", "AllGather communicate-0", "Decode(host) compute-1"),
    ]
    assert shown(encoded(program, apart=True)) == [
        *("Copy(host) to-host-0", "Encode(host) host-compute-0", "AllGather host-communicate-0"),
        *("Decode(host) host-compute-1", "Copy(device) to-device-1"),
    ]


@pytest.mark.parametrize(
    ("method", "program", "names"),
    [
        (PowerSGD(), POWERSGD, ["Project(left)", "AllReduce", "Project(right)", "AllReduce", "Reconstruct"]),
        (Identity(), POWERSGD, ["Project(left)", "AllReduce", "Project(right)", "AllReduce", "Reconstruct"]),
        (PowerSGD(one_sided=True), ENCODED_ALLREDUCE, ["Project", "AllReduce", "Reconstruct"]),
    ],
)
def test_low_rank_methods(method: Compressor, program, names):
    specs = stages_of(MessageKind.LOW_RANK, program, Capabilities.of(method), Topology(4))
    assert [spec.name for spec in specs] == names
    assert [spec.phase for spec in specs] == [0, 0, 1, 1, 2][: len(names)]


def test_in_place_there_is_one_stage_that_starts_immediately():
    (spec,) = stages_of(MessageKind.IN_PLACE, ALLREDUCE, CODEC, Topology(4))
    assert (spec.name, spec.phase, spec.starts_immediately) == ("Average", 0, True)


def test_a_program_that_does_not_work_is_refused():
    with pytest.raises(ProgramError, match="cannot be added"):
        encoded(ENCODED_ALLREDUCE)
    assert stages_of(MessageKind.ENCODED, ENCODED_ALLREDUCE, Capabilities.of(Cast16()), Topology(4))


# -------------------------------------------------------------------- all programs


@pytest.mark.parametrize(
    ("places", "programs", "sequences", "lanes"),
    [((Place.DEVICE,), 174, 27, 9), pytest.param(tuple(Place), 4341, 1182, 27, marks=pytest.mark.slow)],
)
def test_few_sequences_of_lanes(places, programs, sequences, lanes):
    every = enumerate_programs(EIGHT_BY_EIGHT, places)
    apart = len(places) > 1
    found = {tuple((spec.phase, spec.resource) for spec in encoded(program, apart=apart)) for program in every}
    assert (len(every), len(found)) == (programs, sequences)
    assert len({lane for sequence in found for lane in sequence}) == lanes


@pytest.mark.parametrize("apart", [False, True])
def test_stages_do_every_step_once_and_in_order(apart):
    for program in enumerate_programs(Topology(2, 2), tuple(Place))[::7]:
        specs = encoded(program, Topology(2, 2), apart=apart)
        steps = [
            program[index]
            for spec in specs
            if spec.kind not in (StageKind.CUT, StageKind.JOIN, StageKind.ADD, StageKind.COPY)
            for index in range(spec.first, spec.stop)
        ]
        assert tuple(steps) == program, describe(program)
        assert [spec.phase for spec in specs] == sorted(spec.phase for spec in specs)
        kinds = [spec.encoding for spec in specs if spec.encoding]
        assert kinds == list(ENCODINGS[: sum(isinstance(step, Encode) for step in program)])
        collectives = [spec for spec in specs if spec.kind == StageKind.COLLECTIVE]
        if apart:
            assert [(spec.phase, spec.level, spec.place) for spec in collectives] == [
                site[:3] for site in sites(program)
            ]
        assert len(collectives) == sum(isinstance(step, Collective) for step in program)
        assert any(spec.kind == StageKind.COPY for spec in specs) <= apart


def test_roots_have_all_stages_and_others_fewer():
    layouts = propagate(PARAMETER_SERVER, CODEC, Topology(3))
    specs = encoded(PARAMETER_SERVER, Topology(3))
    mine = [[takes_part(spec, PARAMETER_SERVER, layouts, Topology(3), rank, 1) for spec in specs] for rank in range(3)]
    assert [spec.name for spec in specs] == ["Encode", "Gather", "Recode", "Broadcast", "Decode"]
    assert mine == [[True, True, False, True, True], [True] * 5, [True, True, False, True, True]]


def test_every_collective_has_all_of_its_ranks():
    topology = Topology(2, 2)
    for program in enumerate_programs(topology):
        layouts = propagate(program, CODEC, topology)
        for spec in encoded(program, topology):
            if spec.level is not None:
                for group in topology.groups(spec.level):
                    present = {takes_part(spec, program, layouts, topology, rank, 3) for rank in group}
                    assert len(present) == 1, describe(program)
