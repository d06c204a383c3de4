"""A checkpoint of one number of ranks loads on another: the part of the mean that is still owed stays the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gckernels
from gckernels import DGC, BlockQuant, EFSignSGD, PowerSGD, SigNUM, TopK, Traits
from gckernels.method import METHODS
from gckernels.sync import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    HIERARCHICAL,
    PARAMETER_SERVER,
    POWERSGD,
    PROGRAMS,
    Plan,
    Program,
    Topology,
    UnitPlan,
    enumerate_programs,
    ring,
)
from gckernels.sync.programs.named import default_program
from gckernels.sync.programs.residuals import ENCODINGS, encoded_regions
from gckernels.sync.programs.steps import Encode
from gckernels.sync.resources.feedback import KINDS, Feedback
from gckernels.sync.resources.places import Places
from gckernels.sync.states.jobs import read_job, read_own
from gckernels.sync.states.layout import max_sizes, residual_sizes
from gckernels.sync.states.resharding import reshard
from workloads import topology

NUMELS = (0, 1, 5, 100, 257)
EPS = 2.0**-24


def plan_of(program: Program, compressor: Any, numels: tuple[int, ...] = NUMELS, root: int = 0, **head: Any) -> Plan:
    units = [UnitPlan(f"w{numel}", numel, compressor, program, True, root=root) for numel in numels]
    return Plan(tuple(units), **head)


def saved(plan: Plan, world_size: int, seed: int = 0) -> list[dict[str, Any]]:
    """States that the ranks of a job could have saved: random residuals, equal on ranks that encode the same data."""
    where, states = plan.topology_of(world_size), []
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for rank in range(world_size):
        feedback: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
        for kind, sizes in residual_sizes(plan, where, rank).items():
            for name, numel in sizes.items():
                # magnitudes differ between elements; ranks with the same part of a mean use the same seed
                generator = torch.Generator().manual_seed(seed + 1000 * rank * (kind == "worker") + KINDS.index(kind))
                tensor = torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)
                feedback[kind][name] = factors.setdefault(kind, {}).setdefault(name, tensor) if kind in "pq" else tensor
        states.append(state_of(feedback, plan, rank, world_size))
    return states


def state_of(feedback: dict[str, dict[str, torch.Tensor]], plan: Plan, rank: int, world_size: int) -> dict[str, Any]:
    head = {"step": 4, "rank": rank, "world_size": world_size, "plan": plan.to_json()}
    return head | {"units": [unit.key for unit in plan.units], "feedback": feedback}


def resharded(states: list[dict[str, Any]], plan: Plan, world_size: int, alone: bool = False) -> list[dict[str, Any]]:
    """The residuals that the ranks of another job take over, after their checks. The input is the state of every rank
    or, if ``alone``, the rank's own state."""
    where, found = plan.topology_of(world_size), []
    for rank in range(world_size):
        job = read_own(states[rank], rank, world_size) if alone else read_job(states)
        feedback = Feedback(Places.of(torch.device("cpu")))
        feedback.load_state_dict(reshard(job, plan, where, rank), residual_sizes(plan, where, rank))
        found.append({"feedback": feedback.state_dict()})
    return found


def owed(states: list[dict[str, Any]], plan: Plan) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For every unit: the part of its mean that is still owed, and the sum of magnitudes that bounds its rounding, in
    fp64.

    Only compressors with one state are allowed, whose residual elements are in the order of the unit's elements.
    """
    where, totals = plan.topology_of(len(states)), {}
    for unit in plan.units:
        total, magnitude = torch.zeros(2, unit.numel, dtype=torch.float64)
        for rank, state in enumerate(states):
            program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
            for kind, encoding in zip(
                ENCODINGS, encoded_regions(program, unit.numel, where, rank, unit.root), strict=False
            ):
                if unit.key in state["feedback"][kind]:
                    residual = state["feedback"][kind][unit.key].double()
                    total[encoding.start : encoding.stop] += encoding.weight * residual
                    magnitude[encoding.start : encoding.stop] += encoding.weight * residual.abs()
        totals[unit.key] = total, magnitude
    return totals


def check_kept(old: Plan, old_size: int, new: Plan, new_size: int, alone: bool = False) -> None:
    states = saved(old, old_size)
    before, after = owed(states, old), owed(resharded(states, new, new_size, alone), new)
    for key, (total, magnitude) in before.items():
        # only the resharded residual is rounded to fp32; sums in fp64 have at most some tens of terms
        assert ((after[key][0] - total).abs() <= EPS * magnitude * (1 + 2.0**-20)).all(), key
        assert total.numel() == 0 or total.any()


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


# -------------------------------------------------------------------- several states, momenta, factors


@pytest.mark.parametrize("program", [ALLGATHER, ALLTOALL])
@pytest.mark.parametrize(("old", "new"), [(1, 3), (2, 3), (4, 2), (5, 6)])
def test_momenta_become_their_mean(program, old, new):
    for compressor in (DGC(), DGC(momentum=0.0, clip=1.0), SigNUM()):
        plan = plan_of(program, compressor, (70,))
        states = saved(plan, old)
        mean = torch.stack([state["feedback"]["worker"]["w70"].double() for state in states]).mean(0)
        for state in resharded(states, plan, new):
            residual = state["feedback"]["worker"]["w70"]
            assert ((residual - mean).abs() <= EPS * mean.abs() + 2.0**-45).all()  # terms are up to 1000, in fp64
            assert residual.numel() == 70 * compressor.traits.states


@dataclasses.dataclass(frozen=True)
class _TwoStates(TopK):
    """A compressor with two states, neither a momentum, so that a ring accepts it."""

    traits = Traits(needs_feedback=True, states=2)


def test_states_in_a_ring_lie_shard_by_shard(monkeypatch):
    monkeypatch.setitem(METHODS, "_TwoStates", _TwoStates)
    states = saved(plan_of(ring(3), _TwoStates(), (70,)), 3)
    first, second = torch.arange(70.0), 1000.0 + torch.arange(70.0)
    for state in states:  # shards of 32, 32 and 6 elements
        state["feedback"]["worker"]["w70"] = torch.cat(
            [vector[start : start + 32] for start in (0, 32, 64) for vector in (first, second)]
        )
    for state in resharded(states, plan_of(ring(2), _TwoStates(), (70,)), 2):  # shards of 48 and 22 elements
        expected = torch.cat([first[:48], second[:48], first[48:], second[48:]])
        torch.testing.assert_close(state["feedback"]["worker"]["w70"], expected, rtol=EPS, atol=0)
    for state in resharded(states, plan_of(ALLGATHER, _TwoStates(), (70,)), 2):
        torch.testing.assert_close(state["feedback"]["worker"]["w70"], torch.cat([first, second]), rtol=EPS, atol=0)


def test_a_momentum_of_shards_is_left_out_where_there_are_none(monkeypatch):
    class Moving(SigNUM):
        shard_compressor = property(lambda self: self)

    monkeypatch.setitem(METHODS, "Moving", Moving)
    states = saved(plan_of(ALLTOALL, Moving(), (70,)), 4)
    mean = torch.stack([state["feedback"]["worker"]["w70"].double() for state in states]).mean(0)
    for state in resharded(states, plan_of(ALLGATHER, Moving(), (70,)), 2):
        torch.testing.assert_close(state["feedback"]["worker"]["w70"], mean.float(), rtol=2 * EPS, atol=1e-12)


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize(("old", "new"), [(2, 5), (3, 1), (1, 2)])
def test_low_rank_methods_keep_their_factors(one_sided, old, new):
    method = PowerSGD(rank=2, one_sided=one_sided, rows=10)
    plan = plan_of(ENCODED_ALLREDUCE if one_sided else POWERSGD, method, (200,))
    states = saved(plan, old)
    check_kept(plan, old, plan, new)
    for state in resharded(states, plan, new):
        for kind in ("p", "q"):
            assert state["feedback"][kind].keys() == ({"w200"} if kind == "q" or one_sided else set())
            for name, factor in state["feedback"][kind].items():
                assert torch.equal(factor, states[0]["feedback"][kind][name])
    if old > 1:
        states[1]["feedback"]["q"]["w200"] = states[0]["feedback"]["q"]["w200"] + 1
        with pytest.raises(ValueError, match="ranks 0 and 1 differ in the factor q of w200"):
            read_job(states)


# -------------------------------------------------------------------- states that do not fit


def damaged(change: str, states: list[dict[str, Any]]) -> Any:
    first, second, third = states
    match change:
        case "none":
            return []
        case "one is no dict":
            return [first, None, third]
        case "one is missing":
            return [third, first]
        case "one is there twice":
            return [first, second, second]
        case "one too many":
            return [*states, dict(third)]
        case "a rank that there is not":
            return [first, second, third | {"rank": 3}]
        case "a rank that is no number":
            return [first, second, third | {"rank": True}]
        case "two steps":
            return [first, second, third | {"step": 5}]
        case "two sizes":
            return [first, second, third | {"world_size": 4}]
        case "two plans":
            return [first, second, third | {"plan": plan_of(ALLGATHER, EFSignSGD()).to_json()}]
        case "two topologies":
            there = plan_of(ALLTOALL, EFSignSGD(), topology=Topology(1, 3)).to_json()
            return [first, second, third | {"plan": there}]
        case "a topology of another size":
            there = plan_of(ALLTOALL, EFSignSGD(), topology=Topology(2, 2)).to_json()
            return [state | {"plan": there} for state in states]
        case "a plan that is none":
            return [state | {"plan": {"format": "a letter"}} for state in states]
        case "a program that does not work":
            there = json.loads(json.dumps(first["plan"]))
            there["units"][2]["program"].pop()
            return [state | {"plan": there} for state in states]
        case "a root that there is not":
            there = plan_of(PARAMETER_SERVER, EFSignSGD(), root=3).to_json()
            return [state | {"plan": there} for state in states]
        case "a size":
            shard = second["feedback"]["shard"] | {"w100": torch.zeros(33)}
            return [first, second | {"feedback": second["feedback"] | {"shard": shard}}, third]
        case "one has lost something":
            return [first, third, second | {"feedback": third["feedback"] | {"shard": {}}}]
        case "one is not finite":
            third["feedback"]["shard"]["w257"][0] = -torch.inf
            return states
        case "a dtype":
            worker = second["feedback"]["worker"] | {"w100": torch.zeros(100).double()}
            return [first, second | {"feedback": second["feedback"] | {"worker": worker}}, third]
        case _:
            return [first, second, {key: third[key] for key in third if key != change}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "the list is empty"),
        ("one is no dict", r"states\[1\]: state: expected a dict, got NoneType"),
        ("one is missing", "the state of rank 1 of 3 is missing"),
        ("one is there twice", "two states of rank 1"),
        ("one too many", "two states of rank 2"),
        ("a rank that there is not", r"states\[2\]: state: rank must be less than world_size 3, got 3"),
        ("a rank that is no number", r"states\[2\]: state: rank must be an int"),
        ("two steps", "ranks 0 and 2 differ in step: 4 and 5"),
        ("two sizes", "ranks 0 and 2 differ in world_size: 3 and 4"),
        ("two plans", "ranks 0 and 2 differ in plan"),
        ("two topologies", "ranks 0 and 2 differ in plan"),
        ("a topology of another size", r"the plan is for Topology\(machines=2, devices=2\), but the job had 3 ranks"),
        ("a plan that is none", "expected format 'gckernels.plan'"),
        ("a program that does not work", "w5: program .*: does not end"),
        ("a root that there is not", "root is 3, but the job had 3 ranks"),
        ("one has lost something", "rank 1: feedback: the shard residual of w100 is missing"),
        ("one is not finite", "rank 2: feedback: the shard residual of w257 holds inf or NaN"),
        ("a size", "rank 1: feedback: the shard residual of w100 has 33 elements, need 48"),
        ("a dtype", "rank 1: feedback: the worker residual of w100 must be a float32 vector"),
        ("plan", r"states\[2\]: state: plan missing"),
        ("feedback", r"states\[2\]: state: feedback missing"),
    ],
)
def test_a_damaged_list_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_job(damaged(change, saved(plan_of(ALLTOALL, EFSignSGD()), 3)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(ALLTOALL, EFSignSGD(), (0, 1, 5, 100)), "w257 is a unit of the saved plan only"),
        (plan_of(ALLTOALL, EFSignSGD(), (*NUMELS, 6)), "w6 is a unit of the current plan only"),
        (
            plan_of(ALLTOALL, BlockQuant()),
            "w0: compressor in the saved plan: EFSignSGD, in the current one: Block",
        ),
        (plan_of(ALLREDUCE, EFSignSGD()), "the current plan has no residual that could take the saved ones"),
    ],
)
def test_another_plan_is_refused(plan, message):
    states = saved(plan_of(ALLTOALL, EFSignSGD()), 3)
    with pytest.raises(ValueError, match=message):
        reshard(read_job(states), plan, Topology(2), 0)


@pytest.mark.parametrize(
    ("change", "message"), [({"numel": 6}, "elements in"), ({"feedback": False}, "feedback in"), (None, "states in")]
)
def test_another_unit_is_refused(change, message):
    old = plan_of(ALLGATHER, DGC(), (5,))
    other = {"compressor": DGC(momentum=0.0)} if change is None else change
    new = Plan((dataclasses.replace(old.units[0], **other),))
    with pytest.raises(ValueError, match=f"w5: {message} the saved plan"):
        reshard(read_job(saved(old, 3)), new, Topology(2), 0)


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
