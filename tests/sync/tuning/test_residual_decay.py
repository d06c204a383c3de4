"""Residuals of coarse compressors decay in front of an optimizer like Adam, where a list lets trials choose them."""

from __future__ import annotations

import torch

import tunings
from gckernels import BlockQuant, ChunkTopK, EFSignSGD, Identity, PowerSGD, sync
from gckernels.sync.tuning.decay import ADAPTIVE_DECAY, decaying
from gckernels.sync.tuning.trials.rules import STEPS
from models import build
from ranks import run_ranks, values_of

COARSE = (EFSignSGD(), ChunkTopK())


def test_only_coarse_codecs_decay():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    for method in (*COARSE, BlockQuant(bits=4), BlockQuant(), PowerSGD(), Identity()):
        plan = sync.uniform_plan([("weight", weight)], method, world_size=2)
        (unit,) = decaying(plan).units
        assert unit.feedback == (ADAPTIVE_DECAY if method in COARSE else plan.units[0].feedback)


def tuned(accuracy, kind: str) -> tuple[set[float], list[str]]:
    """The feedback of the units of the plan that is found, and the compressors of those that decay."""
    module, handles = build("Mlp"), []
    with tunings.scripted(module, {"signs": "EFSignSGD"}, {tunings.PLAIN: 1.0, "signs": 0.2}, handles):
        model, handle = tunings.tuned_handle("ddp", module, accuracy=accuracy, steps=10)
        handles.append(handle)
        matrices = [each for each in module.parameters() if each.dim() == 2]
        optimizer = getattr(torch.optim, kind)(matrices, lr=0.01)
        for number in range(STEPS + 60):
            optimizer.zero_grad()
            model(module.batch(number, torch.distributed.get_rank())).backward()
            optimizer.step()
    units = [unit for unit in handle.plan.units if unit.feedback]
    handle.close()
    return {unit.feedback for unit in units}, [unit.compressor.name for unit in units if unit.feedback != 1]


def all_tuned() -> list[tuple[set[float], list[str]]]:
    return [tuned(["EFSignSGD"], kind) for kind in ("AdamW", "Muon", "SGD")]


def test_the_plan_that_trials_choose_has_the_decay():
    for adam, muon, sgd in values_of(run_ranks(2, all_tuned)):
        for found in (adam, muon):
            assert found[0] == {ADAPTIVE_DECAY} and {*found[1]} == {"EFSignSGD"}
        assert sgd == ({True}, [])
