"""Plans for PowerSGD: the shapes of its matrices, the programs that fit it, and what travels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gckernels
from gckernels import Identity, PowerSGD, sync
from gckernels.sync import Plan, PlanError, Topology, UnitPlan
from gckernels.sync.plans.strides import memory_shape
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    POWERSGD,
    ProgramError,
    default_program,
)
from gckernels.sync.programs.sizes import sizes_of


def _plan(compressor: PowerSGD, **parameters: torch.Tensor) -> Plan:
    named = [(name, nn.Parameter(tensor)) for name, tensor in parameters.items()]
    return sync.uniform_plan(named, compressor, world_size=2)


def test_a_plan_knows_the_shapes():
    plan = _plan(
        PowerSGD(rank=2),
        matrix=torch.zeros(6, 7),
        narrow=torch.zeros(4, 4),  # its factors have (4 + 4) * 2 numbers, no fewer than the matrix
        vector=torch.zeros(100),
        convolution=torch.zeros(8, 3, 2, 2),
        transposed=torch.zeros(7, 6).T,
        channels_last=torch.zeros(8, 3, 2, 2).to(memory_format=torch.channels_last),
        empty=torch.zeros(0, 5),
        scalar=torch.tensor(1.0),
    )
    found = {unit.parameter: getattr(unit.compressor, "rows", None) for unit in plan.units}
    assert found == {
        "matrix": 6,
        "narrow": None,
        "vector": None,
        "convolution": 8,
        "transposed": 7,
        "channels_last": 8,
        "empty": None,
        "scalar": None,
    }
    for unit in plan.units:
        assert unit.program == POWERSGD
        assert unit.compressor == (
            Identity() if found[unit.parameter] is None else PowerSGD(2, rows=unit.compressor.rows)
        )
        assert unit.feedback == (found[unit.parameter] is not None)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.fingerprint() != _plan(PowerSGD(rank=2), matrix=torch.zeros(7, 6)).fingerprint()


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (torch.zeros(2, 3), (2, 3)),
        (torch.zeros(2, 3).T, (2, 3)),
        (torch.zeros(4, 1, 3, 3), (4, 1, 3, 3)),
        (torch.zeros(4, 5, 3, 2).to(memory_format=torch.channels_last), (4, 3, 2, 5)),
        (torch.zeros(4, 5, 1, 1).to(memory_format=torch.channels_last), (4, 1, 1, 5)),
        (torch.zeros(6, 4)[::2], (3, 4)),
        (torch.zeros(3, 1).expand(3, 4), (3, 4)),
        (torch.zeros(()), ()),
    ],
)
def test_memory_shape(tensor, shape):
    assert memory_shape(tensor) == shape


def test_default_programs():
    for world_size in (1, 2, 5):
        assert default_program(PowerSGD(), world_size) == POWERSGD
        assert default_program(PowerSGD(one_sided=True), world_size) == ENCODED_ALLREDUCE


@pytest.mark.parametrize(
    ("compressor", "program", "message"),
    [
        (
            PowerSGD(rows=10),
            ENCODED_ALLREDUCE,
            "PowerSGD has two rounds and needs Encode AllReduce Encode",
        ),
        (PowerSGD(rows=10, one_sided=True), POWERSGD, "added in fp32; PowerSGD is neither"),
        (PowerSGD(rows=10), ALLGATHER, "PowerSGD has two rounds"),
        (PowerSGD(rows=10, one_sided=True), ALLGATHER, "step 0, Encode: payloads of PowerSGD .* only added"),
        (PowerSGD(rows=10, one_sided=True), ALLTOALL, "step 0, Encode: payloads of PowerSGD cannot be cut"),
        (PowerSGD(), POWERSGD, "step 0, Encode: PowerSGD: rows is not set"),
        (PowerSGD(rows=7), POWERSGD, "step 0, Encode: PowerSGD: 100 elements are no matrix of rows=7"),
        (PowerSGD(rows=50), POWERSGD, "step 0, Encode: PowerSGD: rank=4 is more than a matrix of 50 x 2 has"),
        (gckernels.Cast16(), POWERSGD, "a method of two rounds, or one whose payloads are added in fp32; Cast16 is"),
        (gckernels.EFSignSGD(), POWERSGD, "EFSignSGD is neither"),
    ],
)
def test_programs_that_do_not_fit(compressor, program, message):
    with pytest.raises(ProgramError, match=message):
        sizes_of(program, 100, torch.float32, compressor, Topology(2))
    plan = Plan((UnitPlan("weight", 100, compressor, program, False),))
    with pytest.raises(PlanError, match=message):
        plan.check([("weight", nn.Parameter(torch.zeros(10, 10)))], 2)


def test_what_travels():
    factors = [data.nbytes for data in sizes_of(POWERSGD, 1200, torch.bfloat16, PowerSGD(rank=3, rows=30), Topology(4))]
    assert factors == [2400, 368, 368, 480, 480, 2400]
    exact = [data.nbytes for data in sizes_of(POWERSGD, 9, torch.float32, Identity(), Topology(4))]
    assert exact == [36, 48, 48, 0, 0, 36]
    one_sided = PowerSGD(3, True, True, 30)
    in_turn = [data.nbytes for data in sizes_of(ENCODED_ALLREDUCE, 1200, torch.float32, one_sided, Topology(4))]
    assert in_turn == [4800, 424, 424, 4800]
    assert sizes_of(ALLREDUCE, 1200, torch.float32, one_sided, Topology(4))[-1].flow.complete
