"""FSDP2 on ranks that are in machines: gradients are added up inside a machine, and encoded between machines alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gckernels import sync
from gckernels.sync.programs import SHARDS_OF_LEVELS, AllToAll, Decode, Encode, Level
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, adamw, conserving, digest, model_of, shards_of, train

QUANT = "BlockQuant(bits=4)"
TOPOLOGY = (2, 2)
STEPS = 3


def planned(model: Any, spec: str) -> sync.Plan:
    return sync.uniform_plan(model, spec, topology=TOPOLOGY)


def trained(specs: tuple[str | None, ...], name: str) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    """By compressor the shards of a rank after some steps, and the figures of the attachment."""
    found = []
    for spec in specs:
        setting = SETTINGS[name]
        model = model_of(setting, "fsdp")
        attachment = None if spec is None else sync.attach(model, planned(model, spec))
        train(model, setting, range(STEPS), torch.optim.SGD(model.parameters(), 1e-2))
        found.append((shards_of(model), {} if attachment is None else attachment.stats()))
        if attachment is not None:
            attachment.close()
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("accumulates", "bare root"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "prefetches", "sums", "frozen")),
    ],
)
def test_only_the_order_of_sums_differs_if_nothing_is_compressed(name):
    for (alone, _), (attached, _) in values_of(run_ranks(4, trained, (None, "Identity"), name)):
        for one, other in zip(alone, attached, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_bytes_between_machines_and_residuals_are_those_of_a_part():
    numels, matrices = 7 * 33 + 33 + 2 * (33 * 12 + 12) + 12 + 1, 7 * 33 + 2 * 33 * 12 + 12
    each = values_of(run_ranks(4, trained, (QUANT,), "plain"))
    for ((_, stats),) in each:
        assert stats["world_size"] == 2 and 0 < stats["sent_nbytes"] < stats["plain_nbytes"]
    for first in (0, 1):  # the devices of a machine have different parts, and those of all machines the same
        assert each[first][0][1]["residual_nbytes"] == each[first + 2][0][1]["residual_nbytes"]
    assert sum(stats["residual_nbytes"] for ((_, stats),) in each[:2]) == 4 * matrices
    assert sum(stats["plain_nbytes"] for ((_, stats),) in each[:2]) == 4 * numels / 2


@pytest.mark.parametrize(
    ("spec", "leaves"), [pytest.param(QUANT, False, marks=pytest.mark.slow), (QUANT, True), ("TopK(ratio=0.1)", False)]
)
def test_nothing_is_lost(spec, leaves):
    exact, sent = (values_of(run_ranks(4, conserving, each, leaves, "fsdp", 32, TOPOLOGY)) for each in (None, spec))
    for one, other in zip(exact, sent, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def resumed(bits: int) -> tuple[str, str, list[str]]:
    """The digests of a training, and of one that was interrupted; and the errors of plans for other topologies."""
    setting, digests = SETTINGS["plain"], []
    texts: list[str] = []
    for interrupted in (False, True):
        model = model_of(setting, "fsdp")
        attachment, optimizer = sync.attach(model, planned(model, QUANT), residual_bits=bits), adamw(model)
        train(model, setting, range(3), optimizer)
        if interrupted:
            kept = [each.clone() for each in shards_of(model)]
            states = optimizer.state_dict(), attachment.state_dict()
            with pytest.raises(sync.PlanError, match=r"model was attached with one for Topology\(machines=2") as error:
                attachment.change_plan(sync.uniform_plan(model, QUANT))
            texts.append(str(error.value))
            attachment.close()
            model = model_of(setting, "fsdp")
            with torch.no_grad():
                for parameter, each in zip(model.parameters(), kept, strict=True):
                    parameter.to_local().copy_(each)
            attachment, optimizer = sync.attach(model, planned(model, QUANT), residual_bits=bits), adamw(model)
            optimizer.load_state_dict(states[0])
            attachment.load_state_dict(states[1])
        train(model, setting, range(3, 6), optimizer)
        digests.append(digest(model))
        attachment.close()
    return digests[0], digests[1], texts


@pytest.mark.parametrize("bits", [pytest.param(32, marks=pytest.mark.slow), 8])
def test_a_resumed_training_goes_on_bit_for_bit(bits):
    for alone, again, texts in values_of(run_ranks(4, resumed, bits)):
        assert again == alone and len(texts) == 1


def refused() -> str:
    """The error of a plan with another program between the same states."""
    model = model_of(SETTINGS["plain"], "fsdp")
    plan = planned(model, QUANT)
    assert {unit.program for unit in plan.units} == {SHARDS_OF_LEVELS}
    _, *others = SHARDS_OF_LEVELS
    encoded = (Encode(), AllToAll(Level.INTRA), Decode(), *others)
    swapped = [dataclasses.replace(unit, program=encoded) for unit in plan.units]
    with pytest.raises(sync.PlanError, match="only the program") as error:
        sync.attach(model, plan.with_units(swapped))
    return str(error.value)


def test_other_programs_between_machines_are_refused():
    for text in values_of(run_ranks(4, refused)):
        assert "is executed, got" in text
