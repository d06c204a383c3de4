"""A checkpoint of one number of ranks loads on another: the part of the mean that is still owed stays the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gckernels
from gckernels import DGC, BlockQuant, EFSignSGD
from gckernels.sync import Topology
from gckernels.sync.programs import (
    ALLGATHER,
    ALLTOALL,
    HIERARCHICAL,
    PARAMETER_SERVER,
    PROGRAMS,
    Program,
    enumerate_programs,
    ring,
)
from gckernels.sync.programs.named import default_program
from gckernels.sync.programs.residuals import ENCODINGS, encoded_regions
from gckernels.sync.programs.steps import Encode
from gckernels.sync.resources.feedback import KINDS
from gckernels.sync.states.jobs import read_job, read_own
from gckernels.sync.states.layout import max_sizes, residual_sizes
from gckernels.sync.states.resharding import reshard
from resharded_jobs import check_kept, plan_of, resharded, saved
from workloads import topology

# -------------------------------------------------------------------- conservation


def named(name: str, world_size: int) -> Program:
    if name == "ring":
        return ring(world_size) if world_size > 1 else ALLGATHER
    return default_program(BlockQuant(), world_size) if name == "default" else PROGRAMS[name]


@given(
    names=st.sampled_from(
        [*(name for name in PROGRAMS if name not in ("allreduce", "powersgd")), "ring", "default"]
    ).map(lambda name: (name, name))
    | st.tuples(*[st.sampled_from(["allgather", "alltoall", "parameter_server", "ring"])] * 2),
    old=st.integers(1, 6),
    new=st.integers(1, 6),
    roots=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
@example(names=("default", "default"), old=3, new=2, roots=(0, 0))  # two residuals become one
@example(names=("alltoall", "alltoall"), old=2, new=5, roots=(0, 0))
@example(names=("ring", "ring"), old=5, new=6, roots=(0, 0))
@example(names=("parameter_server", "parameter_server"), old=4, new=4, roots=(1, 2))
def test_the_mass_is_kept(names, old, new, roots):
    plans = []
    for name, world_size, root in zip(names, (old, new), roots, strict=True):
        compressor = gckernels.Cast16() if name == "encoded_allreduce" else EFSignSGD()
        where = topology(world_size)
        plans.append(plan_of(named(name, world_size), compressor, root=root % world_size, topology=where))
    check_kept(plans[0], old, plans[1], new)


OPTIONS = [program for program in enumerate_programs(Topology(2, 2)) if Encode() in program][::6]
SIZES = (Topology(2, 2), Topology(3, 2), Topology(2, 3), Topology(3, 1), Topology(1, 2))
CHANGES = list(itertools.permutations(SIZES, 2))
FEW = 6  # `make test` takes every sixth change of the size, others for the next option


@pytest.mark.parametrize("every", [FEW, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("index", range(len(OPTIONS)))
def test_the_mass_is_kept_with_two_levels(index, every):
    """Both jobs have the same program, or the new job another one, which may encode more or fewer times."""
    for old, new in CHANGES[index % every :: every]:
        old_plan = plan_of(OPTIONS[index], EFSignSGD(), (1, 100), root=1, topology=old)
        for program in (OPTIONS[index], OPTIONS[index - 7]):
            new_plan = plan_of(program, EFSignSGD(), (1, 100), root=0, topology=new)
            check_kept(old_plan, old.world_size, new_plan, new.world_size)


@pytest.mark.parametrize("program", [HIERARCHICAL, *OPTIONS])
def test_ranks_that_encode_the_same_keep_the_same(program):
    old = plan_of(program, EFSignSGD(), (100,), topology=Topology(2, 2))
    new = plan_of(program, EFSignSGD(), (100,), topology=Topology(3, 2))
    found = resharded(saved(old, 4), new, 6)
    for number, kind in enumerate(ENCODINGS):
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        for rank, state in enumerate(found):
            if "w100" in state["feedback"][kind]:
                encoding = encoded_regions(program, 100, Topology(3, 2), rank, 0)[number]
                residual = state["feedback"][kind]["w100"]
                assert torch.equal(pieces.setdefault((encoding.start, encoding.stop), residual), residual)


def test_by_hand():
    old = plan_of(ALLTOALL, EFSignSGD(), (20,))
    states = saved(old, 2)
    for rank, state in enumerate(states):
        state["feedback"]["worker"]["w20"] = torch.arange(20.0) * (1 + 2 * rank)  # the mean is 0, 2, 4, ...
        state["feedback"]["shard"]["w20"] = torch.full(((16, 4)[rank],), 10.0 * (1 + rank))
    found = resharded(states, old, 3)  # shards of 16, 4 and no elements
    mean, shards = torch.arange(20.0) * 2, torch.tensor([10.0] * 16 + [20.0] * 4)
    for rank, (start, stop) in enumerate([(0, 16), (16, 20), (20, 20)]):
        assert torch.equal(found[rank]["feedback"]["worker"]["w20"], mean)
        assert torch.equal(found[rank]["feedback"]["shard"]["w20"], shards[start:stop])
    for state in resharded(states, plan_of(ALLGATHER, EFSignSGD(), (20,)), 3):  # one encoding takes over both
        assert torch.equal(state["feedback"]["worker"]["w20"], mean + shards)
        assert not state["feedback"]["shard"]


def test_where_nothing_was_kept_nothing_is_made():
    old = plan_of(ALLTOALL, EFSignSGD())
    for states in (saved(old, 1), saved(old, 3)):
        for state in states:
            state["feedback"], state["units"] = {kind: {} for kind in KINDS}, []
        for state in resharded(states, old, 2):
            assert state["feedback"] == {kind: {} for kind in KINDS}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_an_equally_large_job_goes_on_with_its_own(order):
    plan = plan_of(ALLTOALL, DGC(workers=3))
    states = saved(plan, 3)
    again = plan_of(ALLTOALL, DGC(workers=3, ratio=0.5))
    for rank in range(3):
        for job in (read_job([states[other] for other in order]), read_own(states[rank], rank, 3)):
            found = reshard(job, again, Topology(3), rank)
            for kind, residuals in states[rank]["feedback"].items():
                assert found[kind].keys() == residuals.keys()
                assert all(found[kind][name] is residual for name, residual in residuals.items())


# -------------------------------------------------------------------- one rank's residuals for other programs


FLAT = [ALLGATHER, ALLTOALL, PARAMETER_SERVER, ring(3)]


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(FLAT, 2)))
def test_ranks_that_read_their_own_keep_the_mass_together(old, new):
    for roots in ((0, 0), (2, 1)):
        plans = [plan_of(each, EFSignSGD(), root=root) for each, root in zip((old, new), roots, strict=True)]
        check_kept(plans[0], 3, plans[1], 3, alone=True)


def test_another_topology_is_nothing_to_flat_programs():
    states = saved(plan_of(ALLTOALL, EFSignSGD()), 4)
    plan = plan_of(ALLTOALL, EFSignSGD(), topology=Topology(2, 2))
    for alone in (False, True):
        for rank, found in enumerate(resharded(states, plan, 4, alone)):
            for kind, residuals in states[rank]["feedback"].items():
                assert all(torch.equal(found["feedback"][kind][key], each) for key, each in residuals.items())


@pytest.mark.parametrize("program", OPTIONS)
def test_ranks_that_read_their_own_keep_the_mass_or_refuse(program):
    """When ranks change between a flat program and one of two levels, each rank's residual has a place, or an error
    asks for the states of the others."""
    for old, new in ((ALLTOALL, program), (program, ALLTOALL)):
        plans = [plan_of(each, EFSignSGD(), (100,), topology=Topology(2, 2)) for each in (old, new)]
        where = plans[1].topology_of(4)
        first = [encoded_regions(new, 100, where, rank, 0)[0] for rank in range(4)]
        if all((each.start, each.stop, each.copies) == (0, 100, 1) for each in first):
            check_kept(plans[0], 4, plans[1], 4, alone=True)
        else:
            states = saved(plans[0], 4)
            with pytest.raises(
                ValueError, match="w100: the residuals of this rank alone do not fit its new program; pass the list"
            ):
                resharded(states, plans[1], 4, alone=True)


def test_a_momentum_stays_with_its_rank():
    states = saved(plan_of(ALLGATHER, DGC(), (70,)), 3)
    for rank, found in enumerate(resharded(states, plan_of(ALLTOALL, DGC(), (70,)), 3, alone=True)):
        assert torch.equal(found["feedback"]["worker"]["w70"], states[rank]["feedback"]["worker"]["w70"])


# -------------------------------------------------------------------- sizes of residuals


@pytest.mark.parametrize("program", [*FLAT, *OPTIONS, HIERARCHICAL])
def test_the_largest_residuals_are_known_without_going_over_all_ranks(program):
    where = Topology(3) if program in FLAT else Topology(2, 2)
    for numel, root in itertools.product((0, 1, 20, 100), (0, where.world_size - 1)):
        plan = plan_of(program, EFSignSGD(), (numel,), root=root)
        largest: dict[str, int] = {}
        for rank in range(where.world_size):
            for kind, sizes in residual_sizes(plan, where, rank).items():
                for size in sizes.values():
                    largest[kind] = max(size, largest.get(kind, 0))
        assert max_sizes(plan.units[0], where) == {kind: size for kind, size in largest.items() if size}
