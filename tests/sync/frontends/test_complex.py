"""Complex parameters are synchronised with the same bits as a model that holds them as pairs of real numbers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, Identity, PowerSGD, sync
from gckernels.sync import Plan, PlanError, UnitPlan, attach
from gckernels.sync.frontends.budget import within_budget
from gckernels.sync.programs import ALLREDUCE, ALLTOALL
from models import SMALL_BUCKETS
from ranks import run_ranks, values_of
from workloads import combinations, digest_of, topology

STEPS = 5


class Waves(nn.Module):
    """Complex parameters of all kinds, and a real layer: two matrices, one of them column-major, a conjugate, a vector,
    a scalar and an empty tensor. With ``in_reals`` the parameters are the same numbers as pairs of real ones."""

    def __init__(self, in_reals: bool = False, dtype: torch.dtype = torch.cfloat) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = {
            "matrix": torch.randn(23, 41, dtype=dtype),
            "columns": torch.randn(30, 41, dtype=dtype).t(),
            "conjugate": torch.randn(30, 30, dtype=dtype).conj(),
            "vector": torch.randn(30, dtype=dtype),
            "scalar": torch.randn((), dtype=dtype),
            "empty": torch.randn(0, 3, dtype=dtype),
        }
        self.in_reals = in_reals
        for name, value in values.items():
            if in_reals:
                value = torch.view_as_real(value.resolve_conj())
            self.register_parameter(name, nn.Parameter(value))
        self.output = nn.Linear(30, 7).to(value.dtype if in_reals else dtype.to_real())

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        get = lambda name: torch.view_as_complex(getattr(self, name)) if self.in_reals else getattr(self, name)
        wave = batch["x"].to(get("matrix").dtype) @ get("matrix") @ get("columns")
        wave = (wave @ get("conjugate") + get("vector")) * get("scalar") + get("empty").sum()
        return nn.functional.cross_entropy(self.output(wave.abs() / 100), batch["y"])

    @staticmethod
    def batch(step: int, rank: int) -> dict[str, Any]:
        x = torch.randn(8, 23, generator=torch.Generator().manual_seed(1000 * step + rank))
        return {"x": x, "y": x[:, :7].argmax(1)}


def few(name: str, parameter: torch.Tensor) -> bool:
    """Exempt the small parameters by name: the real form of a parameter has one dimension more."""
    return name in ("vector", "scalar", "empty", "output.bias")


def real_grads(module: nn.Module) -> list[torch.Tensor]:
    """All gradients that exist, complex ones viewed as real numbers."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]


# -------------------------------------------------------------------- comparison with real parameters


def twins(settings: list[tuple[str, str]]) -> list[list[tuple[str, ...]]]:
    """For every compressor and program: the digests of each step's gradients, and of the residuals at the end. Each
    entry has three digests: for the model with real parameters under the DDP hook, for the complex model under the
    hook, and for the complex model under an attachment."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for spec, program in settings:
        modules = [Waves(in_reals=True), Waves(), Waves()]
        models = [DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS) for module in modules[:2]]
        plans = [
            sync.uniform_plan(model, spec, program=program, exempt=few, topology=topology(world_size))
            for model in (*models, modules[2])
        ]
        assert plans[0] == plans[1] == plans[2]
        ways: list[Any] = [attach(model, plan) for model, plan in zip(models, plans, strict=False)]
        ways.append(attach(modules[2], plans[2], bucket_cap_mb=SMALL_BUCKETS))
        digests: list[tuple[str, ...]] = []
        for step in range(STEPS):
            for model in (*models, modules[2]):
                model.zero_grad(set_to_none=step % 2 == 0)
                model(Waves.batch(step, rank)).backward()
            digests.append(tuple(digest_of(real_grads(module)) for module in modules))
        states = [front.state_dict()["feedback"] for front in ways]
        digests.append(tuple(digest_of(part[name] for part in s.values() for name in sorted(part)) for s in states))
        digests.append(tuple(str(front.sent_nbytes_per_step()) for front in ways))
        for front in ways:
            front.close()
        found.append(digests)
    return found


FEW = [
    ("Identity", "allreduce"),
    ("Cast16", "encoded_allreduce"),
    ("TopK", "allgather"),
    ("EFSignSGD", "alltoall"),
    ("BlockQuant", "alltoall"),
    ("DGC", "hierarchical"),
    ("PowerSGD", "powersgd"),
]


@pytest.mark.parametrize("settings", [FEW, pytest.param(combinations(), marks=pytest.mark.slow)], ids=["few", "all"])
def test_as_with_real_parameters(settings):
    for setting, *ranks in zip(settings, *values_of(run_ranks(2, twins, settings)), strict=True):
        for digests in ranks:
            assert digests[:STEPS] == ranks[0][:STEPS]  # residuals differ between ranks
            for real, hook, ours in digests:
                assert real == hook == ours, setting


# -------------------------------------------------------------------- comparison with plain DDP


def exact(dtype: torch.dtype) -> list[str]:
    """Digests of the gradients under plain DDP, and under both front ends with Identity: whole units, parts, and no
    encoding; and with complex and real parameters in one launch."""
    rank = dist.get_rank()
    plain = DistributedDataParallel(Waves(dtype=dtype))
    plans = [
        sync.uniform_plan(plain.module.named_parameters(), Identity(), program=program, world_size=2)
        for program in (None, ALLREDUCE)
    ]
    if dtype == torch.cfloat:
        plans.append(
            sync.uniform_plan(plain.module.named_parameters(), Identity(), program=ALLTOALL, world_size=2).parted(160)
        )
    digests = []
    for plan in plans:
        module = Waves(dtype=dtype)
        hooked, ours, mixed = DistributedDataParallel(module), copy.deepcopy(module), copy.deepcopy(module)
        launched = plan.with_units(dataclasses.replace(unit, launch=0) for unit in plan.units)
        ways = attach(hooked, plan), attach(ours, plan), attach(mixed, launched)
        for step in range(3):
            for model in (plain, hooked, ours, mixed):
                model.zero_grad()
                model(Waves.batch(step, rank)).backward()
            expected = digest_of(real_grads(plain.module))
            assert {digest_of(real_grads(each)) for each in (module, ours, mixed)} == {expected}
            assert [p.grad.stride() for p in ours.parameters()] == [p.grad.stride() for p in module.parameters()]
            digests.append(expected)
        for front in ways:
            front.close()
    return digests


@pytest.mark.parametrize("dtype", [torch.cfloat, pytest.param(torch.cdouble, marks=pytest.mark.slow)])
def test_what_is_sent_exactly_is_the_mean_of_plain_ddp(dtype):
    first, second = values_of(run_ranks(2, exact, dtype))
    assert first == second


def around() -> None:
    """Frozen, unused, accumulated, budgeted and checkpointed complex parameters behave like real ones."""
    rank = dist.get_rank()
    module, twin = Waves(), Waves(in_reals=True)
    for each in (module, twin):
        each.vector.requires_grad_(False)
        unused = torch.ones(20, dtype=torch.cfloat)
        each.unused = nn.Parameter(unused if each is module else torch.view_as_real(unused))
    with pytest.warns(UserWarning, match="averaged without compression"):
        ways = [
            attach(
                each,
                sync.uniform_plan(each, BlockQuant(), exempt=few),
                find_unused_parameters=True,
                memory_budget_mb=0.03,
            )
            for each in (module, twin)
        ]
    for step in range(3):
        for each, front in zip((module, twin), ways, strict=True):
            with front.no_sync():
                each(Waves.batch(step, rank)).backward()
            each(Waves.batch(step + 100, rank)).backward()
            assert each.vector.grad is None and each.unused.grad is None
        assert digest_of(real_grads(module)) == digest_of(real_grads(twin))
    states = [front.state_dict() for front in ways]
    assert states[0]["plan"] == states[1]["plan"]
    ways[0].load_state_dict(states[1])  # each model loads the other's state
    for front in ways:
        front.close()


def test_everything_else_is_as_with_real_parameters():
    values_of(run_ranks(2, around))


# -------------------------------------------------------------------- plans


def test_a_unit_counts_real_numbers():
    parameters = dict(Waves().named_parameters())
    plan = sync.uniform_plan(parameters.items(), PowerSGD(rank=2), world_size=2)
    units = {unit.parameter: unit for unit in plan.units}
    assert units["matrix"].numel == 2 * 23 * 41 and units["matrix"].compressor.rows == 23
    assert units["columns"].numel == 2 * 41 * 30 and units["columns"].compressor.rows == 30  # in the order of memory
    assert units["vector"].compressor == units["scalar"].compressor == Identity()  # fewer than two dimensions
    plan.check(parameters.items(), 2)
    with pytest.raises(PlanError, match="matrix: 943 elements in the plan, 1886 in the model"):
        wrong = dataclasses.replace(units["matrix"], numel=23 * 41)
        Plan((wrong, *plan.units[1:])).check(parameters.items(), 2)
    assert Plan(()).fitted(parameters.items())[0].units[0].numel == 2 * 23 * 41


def test_double_precision_is_reduced_as_it_is():
    parameters = dict(Waves(dtype=torch.cdouble).named_parameters())
    plan = sync.uniform_plan(parameters.items(), BlockQuant(), world_size=2)
    assert {unit.program for unit in plan.units} == {ALLREDUCE}
    with pytest.raises(PlanError, match=r"matrix: torch\.complex128 cannot be encoded, only reduced"):
        Plan((dataclasses.replace(plan.units[0], program=ALLTOALL), *plan.units[1:])).check(parameters.items(), 2)


def test_complex_and_real_parameters_do_not_merge():
    parameters = {"wave": nn.Parameter(torch.ones(2, dtype=torch.cfloat)), "gain": nn.Parameter(torch.ones(3))}
    merged = UnitPlan("wave", 7, Identity(), ALLTOALL, False, also=("gain",))
    with pytest.raises(PlanError, match=r"merges parameters of torch\.complex64 and torch\.float32"):
        Plan((merged,)).check(parameters.items(), 2)


def test_memory_is_counted_in_real_numbers():
    pairs = []
    for in_reals in (False, True):
        parameters = dict(Waves(in_reals).named_parameters())
        plan = sync.uniform_plan(parameters.items(), BlockQuant(), exempt=few, world_size=2)
        with pytest.warns(UserWarning):
            pairs.append(within_budget("test", plan, parameters, 2, 20_000))
    assert pairs[0] == pairs[1]
