"""Resharding of methods that remember more than one residual: momenta, several states, and factors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gckernels import DGC, PowerSGD, SigNUM, TopK, Traits
from gckernels.compressor import COMPRESSORS
from gckernels.sync.programs import ALLGATHER, ALLTOALL, ENCODED_ALLREDUCE, POWERSGD, ring
from gckernels.sync.states.jobs import read_job
from resharded_jobs import EPS, check_kept, plan_of, resharded, saved


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
    monkeypatch.setitem(COMPRESSORS, "_TwoStates", _TwoStates)
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

    monkeypatch.setitem(COMPRESSORS, "Moving", Moving)
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
