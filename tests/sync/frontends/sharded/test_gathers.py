"""Gathers of parameters beside the computation: exact ones change nothing, encoded ones give all ranks the same
parameters, which are near to the exact ones."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gckernels import BlockQuant, Cast16, from_spec, sync
from gckernels.sync.messages.gathers import GatheredParameter, payload_nbytes
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, Setting, adamw, digest, fsdp_modules, model_of, split, train

PARTLY = Setting(options={"reshard_after_forward": 2})


def resharded_to_some() -> list[str]:
    """Digests without and with an attachment, where backward gathers parameters from half of the ranks."""
    digests = []
    for plan in (None, "Identity"):
        model = model_of(PARTLY, "fsdp")
        attachment = None if plan is None else sync.attach(model, plan)
        train(model, PARTLY, range(1), adamw(model))  # the only step in which the order of sums does not matter
        digests.append(digest(model))
        if attachment is not None:
            attachment.close()
    return digests


def test_gathers_from_some_ranks_are_left_to_fsdp():
    for alone, attached in values_of(run_ranks(4, resharded_to_some)):
        assert attached == alone


class Wide(nn.Module):
    """Two layers of different width, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 70), nn.Linear(70, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def seen(weights: str | None) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """The parameters with which each rank computes in forward, and those of the optimizers; the bytes per step."""
    torch.manual_seed(0)
    model: Any = Wide()
    exact = [each.detach().clone() for each in model.parameters()]
    split(model, (model.first, model), "fsdp")
    found: list[torch.Tensor] = []
    for part in (model.first, model.second):
        part.register_forward_hook(
            lambda module, *_: found.extend(each.detach().clone() for each in module.parameters(recurse=False)),
            prepend=True,  # before FSDP shards them again
        )
    attachment = sync.attach(model, "Identity", weights=weights)
    model(torch.zeros(2, 40)).sum().backward()
    sent = attachment.stats()["gathered_nbytes"] if weights else 0.0
    attachment.close()
    return found, exact, float(sent)


@pytest.mark.parametrize(("weights", "error"), [("BlockQuant", 0.005), ("Cast16", 0.004), ("Identity", 0.0)])
def test_all_ranks_compute_with_the_same_parameters(weights, error):
    ranks = values_of(run_ranks(3, seen, weights))
    for found, exact, _ in ranks:
        for mine, theirs, one in zip(found, ranks[0][0], exact, strict=True):
            assert torch.equal(mine, theirs)
            assert (mine - one).abs().max() <= error * one.abs().max()
            assert error == 0.0 or one.dim() == 1 or not torch.equal(mine, one)
            assert one.dim() > 1 or torch.equal(mine, one)


def test_the_bytes_of_gathers_are_counted():
    exact = 24 * 4  # a row has a third of 70 elements
    rows = [24 * 40, 24, 1 * 70]
    codec = BlockQuant()
    expected = 2 * 2 * (codec.payload_nbytes(rows[0]) + exact + codec.payload_nbytes(rows[2]))
    for _, _, sent in values_of(run_ranks(3, seen, "BlockQuant")):
        assert expected * 0.5 <= sent <= expected  # the root's parameters stay until backward


def differing(weights: str) -> list[dict[str, float]]:
    """By forward and backward: the error of the parameters with which this rank computes, relative to the exact ones,
    and the bytes that were sent. Parameters change after the first, and are loaded after the sixth."""
    torch.manual_seed(0)
    model: Any = Wide()
    split(model, (model.first, model), "fsdp")
    seen: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()), prepend=True)
    attachment, found = sync.attach(model, "Identity", weights=weights), []
    for step in range(8):
        model(torch.zeros(2, 40)).sum().backward()
        for part in fsdp_modules(model):
            part.reshard()
        rows = [torch.zeros(24, 40) for _ in range(3)]
        own = model.first.weight.to_local()
        dist.all_gather(rows, torch.nn.functional.pad(own, (0, 0, 0, 24 - len(own))))
        exact = torch.cat(rows)[:70]
        error = float((seen[-1] - exact).norm() / exact.norm())
        found.append({"error": error, "nbytes": float(attachment.stats()["gathered_nbytes"])})
        with torch.no_grad():
            if step == 0:
                for parameter in model.parameters():
                    parameter.to_local().mul_(1.5)
            if step == 5:
                state = {name: each * 3 for name, each in model.state_dict().items()}
                model.load_state_dict(state)
    found[0]["copied"] = float(attachment.stats()["copied_nbytes"])
    attachment.close()
    return found


def test_differences_to_a_copy_become_exact():
    ranks = values_of(run_ranks(3, differing, "BlockQuant(bits=4)"))
    for found in ranks:
        errors = [each["error"] for each in found]
        assert errors[0] == 0.0  # sent exactly
        assert 0.001 < errors[1] < 0.05
        assert all(later < 0.3 * error for error, later in itertools.pairwise(errors[1:5]))
        assert errors[6] == 0.0  # loaded
        assert found[0]["copied"] == 4 * 3 * (24 * 40 + 24 + 70)
        assert found[2]["nbytes"] < 0.3 * found[0]["nbytes"]
        assert found[6]["nbytes"] == found[0]["nbytes"]


def trained(weights: str | None) -> tuple[str, list[float]]:
    """The digest and losses of a training."""
    model, setting, losses = model_of(SETTINGS["plain"], "fsdp"), SETTINGS["plain"], []
    attachment = sync.attach(model, "BlockQuant(bits=4)", weights=weights)
    model.register_forward_hook(lambda module, inputs, outputs: losses.append(float(outputs.detach().pow(2).mean())))
    train(model, setting, range(6), adamw(model))
    found = digest(model)
    attachment.close()
    return found, losses


def test_trainings_with_encoded_parameters_are_near_to_one_with_exact_ones():
    exact, direct, differences = (
        values_of(run_ranks(2, trained, weights)) for weights in (None, "BlockQuant", "BlockQuant(bits=4)")
    )
    for (alone, losses), *others in zip(exact, direct, differences, strict=True):
        for other, found in others:
            assert alone != other
            assert losses == pytest.approx(found, rel=0.05)


def switching() -> list[tuple[str | None, float, float]]:
    """By step: how parameters are gathered, their error in this step's forward, and the bytes that were sent."""
    torch.manual_seed(0)
    model: Any = Wide()
    split(model, (model.first, model), "fsdp")
    optimizer, seen = torch.optim.SGD(model.parameters(), 1e-2), list[torch.Tensor]()
    model.first.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()), prepend=True)
    plans = {
        weights: replace(sync.uniform_plan(model, "Identity"), weights=None if weights is None else from_spec(weights))
        for weights in (None, "BlockQuant", "BlockQuant(bits=4)")
    }
    attachment, found = sync.attach(model, plans[None]), []
    for weights in (None, "BlockQuant", None, "BlockQuant(bits=4)", "BlockQuant(bits=4)", "BlockQuant", None):
        attachment.change_plan(plans[weights])
        for _ in range(2):  # the first one drains
            rows = [torch.zeros(35, 40) for _ in range(2)]
            dist.all_gather(rows, model.first.weight.to_local().detach())
            exact = torch.cat(rows)
            model(torch.randn(2, 40, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attachment.plan == plans[weights]
        error = float((seen[-1] - exact).norm() / exact.norm())
        found.append((weights, error, float(attachment.stats()["gathered_nbytes"])))
        assert bool(attachment.stats().get("copied_nbytes")) == (weights == "BlockQuant(bits=4)")
    attachment.close()
    return found


@pytest.mark.host_only("FSDP gathers exact parameters on a device itself")
def test_gathers_follow_the_plan():
    for found in values_of(run_ranks(2, switching)):
        for weights, error, nbytes in found:
            assert (error == 0.0) == (weights is None), found
            assert error < 0.05 and (nbytes < 0.5 * found[0][2]) == (weights is not None), found


def filled_in() -> list[str]:
    """The weights of plans of an attachment that was given some."""
    model = model_of(SETTINGS["plain"], "fsdp")
    attachment, found = sync.attach(model, "Identity", weights="BlockQuant"), []
    plain = sync.uniform_plan(model, "Cast16")
    for plan in (None, plain, replace(plain, weights=Cast16()), plain):
        if plan is not None:
            attachment.change_plan(plan)
            train(model, SETTINGS["plain"], range(2), adamw(model))
        found.append("" if attachment.plan.weights is None else attachment.plan.weights.name)
    attachment.close()
    return found


def test_a_plan_with_weights_of_its_own_keeps_them():
    assert values_of(run_ranks(2, filled_in)) == [["BlockQuant", "BlockQuant", "Cast16", "BlockQuant"]] * 2


def test_payloads_are_those_of_each_parameter():
    shares = [GatheredParameter("a", 0, 100, BlockQuant()), GatheredParameter("b", 100, 7, BlockQuant(bits=4))]
    assert payload_nbytes(shares) == BlockQuant().payload_nbytes(100) + BlockQuant(bits=4).payload_nbytes(7)


REFUSED = {
    "TopK": ("fsdp", "ValueError: attach: weights must be None, BlockQuant, Cast16 or Identity, got TopK"),
    "BlockQuant": ("hsdp", "ValueError: attach: weights must be None for a model that is not of fully_shard without"),
    "Nothing": ("fsdp", "ValueError: attach: weights cannot be 'Nothing'"),
}


def refused() -> dict[str, str]:
    found = {}
    for weights, (form, _) in REFUSED.items():
        try:
            sync.attach(model_of(SETTINGS["plain"], form), "EFSignSGD", weights=weights)
        except Exception as error:
            found[weights] = f"{type(error).__name__}: {error}"
    return found


def test_other_weights_are_refused():
    for found in values_of(run_ranks(2, refused)):
        for weights, (_, begin) in REFUSED.items():
            assert found[weights].startswith(begin)


def left_threads() -> list[str]:
    """The threads of an attachment that are left when it is closed, after an evaluation that follows a step."""
    before = set(threading.enumerate())
    model = model_of(SETTINGS["plain"], "fsdp")
    attachment = sync.attach(model, "BlockQuant", weights="BlockQuant")
    train(model, SETTINGS["plain"], range(2), adamw(model))
    with torch.no_grad():
        model.eval()(torch.ones(2, 7))
    attachment.close()
    with torch.no_grad():
        model(torch.ones(2, 7))
    for part in fsdp_modules(model):
        part.reshard()
    return [each.name for each in threading.enumerate() if each not in before and "gckernels" in each.name]


def test_nothing_is_left_of_gathers_when_the_attachment_is_closed():
    assert values_of(run_ranks(2, left_threads)) == [[], []]
