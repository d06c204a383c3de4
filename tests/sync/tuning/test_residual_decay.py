"""Residuals of coarse compressors decay in front of an optimizer like Adam, where an aggressive rule lets trials choose
them."""

from __future__ import annotations

import torch

import tunings
from gckernels import BlockQuant, ChunkTopK, EFSignSGD, Identity, PowerSGD, sync
from gckernels.sync.tuning.decay import ADAPTIVE_DECAY, ResidualDecay
from gckernels.sync.tuning.trials.rules import STEPS
from models import build
from ranks import run_ranks, values_of

COARSE = (EFSignSGD(), ChunkTopK())


def step(kind: type[torch.optim.Optimizer], parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    kind([parameter], lr=0.1).step()  # type: ignore[call-arg]


def test_only_the_optimizer_of_the_parameters_counts_and_only_coarse_codecs_decay():
    one, other = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    methods = (*COARSE, BlockQuant(bits=4), BlockQuant(), PowerSGD(), Identity())
    plans = [sync.uniform_plan([("weight", one)], method, world_size=2) for method in methods]
    decays = [ResidualDecay([one]) for _ in range(2)]
    step(torch.optim.AdamW, other)
    assert [decays[0].of(plan) for plan in plans] == plans
    step(torch.optim.AdamW, one)
    step(torch.optim.SGD, one)  # the first one counts
    for method, plan in zip(methods, plans, strict=True):
        (unit,) = decays[0].of(plan).units
        assert unit.feedback == (ADAPTIVE_DECAY if method in COARSE else plan.units[0].feedback)
    later = ResidualDecay([one])
    step(torch.optim.SGD, one)
    assert [later.of(plan) for plan in plans] == plans


def tuned(accuracy, kind: str) -> tuple[set[float], list[str]]:
    """The feedback of the units of the plan that is found, and the compressors of those that decay."""
    module, handles = build("Mlp"), []
    with tunings.scripted(module, {"signs": "EFSignSGD"}, {tunings.PLAIN: 1.0, "signs": 0.2}, handles):
        model, handle = tunings.tuned_handle("ddp", module, accuracy=accuracy, steps=10)
        handles.append(handle)
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01)
        for number in range(STEPS + 60):
            optimizer.zero_grad()
            model(module.batch(number, torch.distributed.get_rank())).backward()
            optimizer.step()
    units = [unit for unit in handle.plan.units if unit.feedback]
    handle.close()
    return {unit.feedback for unit in units}, [unit.compressor.name for unit in units if unit.feedback != 1]


def all_tuned() -> list[tuple[set[float], list[str]]]:
    return [tuned("aggressive", "AdamW"), tuned("aggressive", "SGD"), tuned(["EFSignSGD"], "AdamW")]


def test_the_plan_that_trials_choose_has_the_decay():
    for adam, sgd, named in values_of(run_ranks(2, all_tuned)):
        assert adam[0] == {ADAPTIVE_DECAY} and {*adam[1]} == {"EFSignSGD"}
        assert sgd == ({True}, []) and named == ({True}, [])
