"""Uniform candidates: a plan for each compressor that the rule allows, with finer ones where it does not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gckernels import BlockQuant, Cast16, ChunkTopK, EFSignSGD, Identity
from gckernels.sync.programs.named import ALLGATHER, ALLTOALL, ENCODED_ALLREDUCE, POWERSGD
from gckernels.sync.traces.model_parameters import unmeasured
from gckernels.sync.tuning.trials.rules import stages_of
from gckernels.sync.tuning.uniform_candidates import MOST, candidates


class Text(torch.nn.Module):
    """An embedding, a layer, and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(1000, 64)
        self.layer = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 1000)


MODEL = Text()
PARAMETERS = dict(MODEL.named_parameters())
TRACE = unmeasured(MODEL, PARAMETERS)


def found(accuracy, world_size=2, steps=1000, trace=TRACE):
    """The compressors of every candidate by parameter, and the programs."""
    stage = stages_of(accuracy, steps)[-1]
    plans = candidates(PARAMETERS, stage, trace, world_size)
    for plan in plans:
        plan.check(PARAMETERS.items(), world_size)
    return [{unit.parameter: unit.compressor for unit in plan.units} for plan in plans], [
        {unit.program for unit in plan.units} for plan in plans
    ]


def test_the_safe_rule_has_three_plans_and_the_one_that_sends_least_is_first():
    plans, programs = found("safe")
    assert [plan["layer.weight"] for plan in plans] == [BlockQuant(bits=4), BlockQuant(), Cast16()]
    assert [plan["words.weight"] for plan in plans] == [BlockQuant(bits=4), BlockQuant(), Cast16()]
    assert [plan["layer.bias"] for plan in plans] == [Identity(), Identity(), Cast16()]
    assert programs == [{ALLGATHER}, {ALLGATHER}, {ENCODED_ALLREDUCE}]
    assert found("safe", world_size=4)[1] == [{ALLTOALL}, {ALLTOALL}, {ENCODED_ALLREDUCE}]


def test_where_the_rule_does_not_allow_a_compressor_the_next_finer_one_follows():
    plans, _ = found("aggressive")
    (signs,) = [plan for plan in plans if plan["layer.weight"] == EFSignSGD()]
    assert signs["words.weight"] == signs["last.weight"] == BlockQuant(bits=4)
    (chunks,) = [plan for plan in plans if plan["layer.weight"] == ChunkTopK()]
    assert chunks["words.weight"] == BlockQuant(bits=4)


def test_errors_that_are_known_of_the_training_count():
    trace = TRACE.remembering({("layer.weight", str(BlockQuant(bits=4))): 0.5})
    plans, _ = found("safe", trace=trace)
    assert plans[0]["layer.weight"] == BlockQuant() and plans[0]["last.weight"] == BlockQuant(bits=4)


def test_an_exact_rule_has_no_plan():
    assert found("exact") == ([], [])


def test_a_list_has_a_plan_for_each_of_its_compressors():
    plans, _ = found(["EFSignSGD", "Identity", "Cast16"])
    assert Counter(plan["words.weight"] for plan in plans) == {EFSignSGD(): 1, Cast16(): 1}
    blocks = [f"{name}(block={128 << at})" for name in ("BlockQuant", "EFSignSGD") for at in range(5)]
    assert len(found(blocks)[0]) == MOST


def test_parameters_that_no_compressor_takes_are_averaged_in_place():
    parameters = {name: torch.nn.Parameter(each.double()) for name, each in PARAMETERS.items()}
    assert candidates(parameters, stages_of("safe")[0], unmeasured(MODEL, parameters), 2) == ()


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_low_rank_plans_leave_vectors_alone_and_have_four_bits_for_other_matrices(world_size):
    plans, programs = found("aggressive", world_size)
    ((low_rank, program),) = [
        (plan, program)
        for plan, program in zip(plans, programs, strict=True)
        if plan["layer.weight"].name == "PowerSGD"
    ]
    assert low_rank["layer.bias"] == Identity()
    assert low_rank["words.weight"] == low_rank["last.weight"] == BlockQuant(bits=4)
    assert program == {POWERSGD, ALLGATHER if world_size == 2 else ALLTOALL}
