"""Models whose parameters are frozen, thawed, added, replaced, removed or converted while they are synchronised."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from gckernels import Identity, sync
from gckernels.sync import Plan, UnitPlan
from gckernels.sync.engine.runtime import Runtime
from gckernels.sync.programs import ALLGATHER, ALLREDUCE
from models import Mlp, build
from ranks import run_ranks, values_of
from workloads import digest_of

NAMES = [f"layers.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]


def gradients_of_step(module: nn.Module, step: int, averages: bool = False) -> str:
    """The digest of the gradients of a step, with plain averages if nobody else averages them."""
    module.zero_grad()
    module(Mlp.batch(step, dist.get_rank())).backward()
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for gradient in found if averages else ():
        dist.all_reduce(gradient.mul_(1 / dist.get_world_size()))
    return digest_of(found)


# -------------------------------------------------------------------- frozen and thawed

TRAINED: list[set[int]] = [{2, 4}, {2, 4}, {4}, {4}, {0, 2, 4}, {0, 2, 4}, {2, 4}, {0}, {2, 4}, {0}, {0, 2, 4}]
"""The layers that are trained in each step."""


def plan_of(kind: str, module: nn.Module) -> Plan:
    """A plan without errors: of all parameters, of those trained at first, in launches, or with a merged unit."""
    named = dict(module.named_parameters())
    if kind == "left out":
        named = {name: each for name, each in named.items() if "layers.0" not in name}
    units = list(sync.uniform_plan(named.items(), Identity(), program=ALLGATHER, world_size=2).units)
    if kind == "launches":
        units = [replace(unit, launch=int("weight" in unit.key)) for unit in units]
    if kind == "merged":
        numel = sum(each.numel() for each in named.values())
        units = [UnitPlan(NAMES[0], numel, Identity(), ALLGATHER, False, also=tuple(NAMES[1:]))]
    return Plan(tuple(units))


def thawed(kind: str) -> None:
    module = build("Mlp")
    plain = copy.deepcopy(module)
    layers = {index: module.layers[index] for index in (0, 2, 4)}
    for each in (module, plain):
        each.layers[0].requires_grad_(False)
    attachment = sync.attach(module, plan_of(kind, module))
    sent = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, trained in enumerate(TRAINED):
            for index in layers:
                for each in (module, plain):
                    each.layers[index].requires_grad_(index in trained)
            assert gradients_of_step(module, step) == gradients_of_step(plain, step, averages=True), step
            numel = sum(each.numel() for index in trained for each in layers[index].parameters())
            stats = attachment.stats()
            assert stats["plain_nbytes"] == 4 * numel or kind == "merged"
            sent.append(stats["sent_nbytes"] / 4 / numel)
    found = [str(each.message) for each in caught if "plan leaves out" in str(each.message)]
    assert bool(found) == (kind == "left out")
    assert all("averaged exactly: layers.0.bias, layers.0.weight;" in text for text in found)
    assert kind == "merged" or all(0.9 < each < 1.2 for each in sent)  # payloads have headers
    attachment.close()


@pytest.mark.parametrize("kind", ["all", "left out", "launches", "merged"])
def test_frozen_parameters_cost_nothing_and_can_be_thawed(kind):
    values_of(run_ranks(2, thawed, kind))


def in_turn() -> None:
    """Layers that are frozen in turn find their messages again, and only what has been trained has residuals."""
    module = build("Mlp")
    plan = sync.uniform_plan(module, "EFSignSGD", exempt=None)
    module.layers[0].requires_grad_(False)
    attachment = sync.attach(module, plan, memory_budget_mb=1)
    numel = {index: sum(each.numel() for each in module.layers[index].parameters()) for index in (0, 2, 4)}
    with mock.patch.object(Runtime, "messages", autospec=True, side_effect=Runtime.messages) as build_messages:
        for step in range(8):
            module.layers[2].requires_grad_(step % 2 == 0)
            module.layers[4].requires_grad_(step % 2 == 1)
            gradients_of_step(module, step)
            if step == 3:
                built = build_messages.call_count
        assert build_messages.call_count == built > 2
    assert attachment.residual_nbytes() == 4 * (numel[2] + numel[4])
    states = attachment.state_dict()
    again = build("Mlp")
    resumed = sync.attach(again, plan)
    resumed.load_state_dict(states)
    assert resumed.residual_nbytes() == attachment.residual_nbytes()
    assert gradients_of_step(again, 8) == gradients_of_step(module.requires_grad_(True), 8)
    attachment.close()
    resumed.close()


def test_layers_that_are_frozen_in_turn():
    values_of(run_ranks(2, in_turn))


def frozen_on_one_rank() -> str:
    module = build("Mlp")
    module.layers[2].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RuntimeError) as caught:
        sync.attach(module, "BlockQuant")
    return str(caught.value)


def test_ranks_with_other_frozen_parameters_are_refused():
    for text in values_of(run_ranks(2, frozen_on_one_rank)):
        assert "the ranks do not have the same settings" in text and "rank 1: layers.2.weight is frozen" in text


def frozen_too_late() -> None:
    module = build("Mlp")
    sync.attach(module, "BlockQuant")
    loss = module(Mlp.batch(0, dist.get_rank()))
    module.layers[4].requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"gradient of layers\.4\.bias came, which is frozen or no longer in the model"
    ):
        loss.backward()
    gradients_of_step(module, 1)


def test_parameters_that_are_frozen_between_forward_and_backward_are_named():
    values_of(run_ranks(2, frozen_too_late))


# -------------------------------------------------------------------- added, replaced, removed, converted


class Wide(Mlp):
    """A model whose output has a second layer, if somebody adds it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.extra: nn.Module | None = None

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        loss = super().forward(batch)
        return loss if self.extra is None else loss + self.extra(batch["x"]).square().mean()


def add(module: Wide) -> None:
    module.extra = nn.Linear(23, 5)


def insert(module: Wide) -> None:
    module.layers.insert(0, nn.Linear(23, 23))


def add_alone(module: Wide) -> None:
    module.requires_grad_(False)
    add(module)


def replace_weight(module: Wide) -> None:
    del module.layers[0].weight  # a new one may be at the same address
    module.layers[0].weight = nn.Parameter(torch.ones(67, 23))


def reload(module: Wide) -> None:
    module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)


def replace_all(module: Wide) -> None:
    module.layers = build("Mlp").layers  # nothing is left that had parameters


CHANGES: dict[str, tuple[Callable[[Wide], Any], str]] = {
    # the change, and a part of the error
    "a head": (add, "averages: extra.bias, extra.weight;"),
    "a layer": (insert, "averages: layers.0.bias, layers.0.weight;"),
    "an adapter of a frozen model": (add_alone, "averages: extra.bias, extra.weight;"),
    "another weight": (replace_weight, "averages: layers.0.weight, and has lost layers.0.weight;"),
    "all layers": (replace_all, "averages: layers.0.bias, layers.0.weight, layers.2.bias, layers.2.weight, "),
    "another state": (reload, "averages: layers.0.bias, layers.0.weight, layers.2.bias, layers.2.weight, "),
    "a norm": (lambda module: weight_norm(module.layers[2]), "and has lost layers.2.weight;"),
    "a parametrization": (lambda module: parametrizations.weight_norm(module.layers[2]), "has lost layers.2.weight;"),
}


def changed() -> dict[str, str]:
    """The error of the first step after each change. A new attachment then averages all gradients."""
    found = {}
    for name, (change, _) in CHANGES.items():
        module, plain = Wide(), Wide()
        sync.attach(module, "BlockQuant")
        for step in range(2):
            gradients_of_step(module, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # weight_norm is deprecated
            for each in (module, plain):
                change(each)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        try:
            gradients_of_step(module, 2)
            optimizer.step()
            found[name] = "no error"
        except RuntimeError as error:
            found[name] = str(error)
        again = sync.attach(module, Identity())
        for step in range(2):
            plain.load_state_dict(module.state_dict())
            assert gradients_of_step(module, step) == gradients_of_step(plain, step, averages=True), name
            optimizer.step()
        again.close()
    return found


def test_parameters_that_were_not_there_are_named():
    for found in values_of(run_ranks(2, changed)):
        for name, (_, expected) in CHANGES.items():
            assert "got parameters since it was attached" in found[name], name
            assert expected in found[name] and "attach to it again" in found[name], name


def removed() -> None:
    """A layer that is taken out of the model is no longer waited for, nor is one that others still hold."""
    for keeps in (False, True):
        module = Wide()
        add(module)
        attachment = sync.attach(module, "EFSignSGD")
        for step in range(2):
            gradients_of_step(module, step)
        kept = module.extra if keeps else None
        module.extra = None
        plain = copy.deepcopy(module)
        attachment.change_plan(exact(module))
        for step in range(2, 5):
            found, expected = gradients_of_step(module, step), gradients_of_step(plain, step, averages=True)
            assert found == expected or step == 2  # which sends what residuals hold
        assert not attachment.is_changing
        if kept is not None:
            with pytest.raises(RuntimeError, match=r"gradient of extra\.bias came, which is frozen or no longer"):
                kept(torch.ones(1, 23)).sum().backward()
        attachment.close()


def exact(module: nn.Module) -> Plan:
    return sync.uniform_plan(module, Identity(), program=ALLREDUCE, world_size=2)


def test_parameters_that_are_removed_are_not_waited_for():
    values_of(run_ranks(2, removed))


def converted() -> None:
    """A training with another dtype is refused on all ranks, and goes on when the model is as it was."""
    module = build("Mlp")
    sync.attach(module, "BlockQuant")
    gradients_of_step(module, 0)
    module.double()
    with pytest.raises(RuntimeError) as caught:
        module(Mlp.batch(1, dist.get_rank(), torch.float64)).backward()
    device = module.layers[4].bias.device
    text = f"gradient of layers.4.bias is torch.float64 [7] on {device}, and was to be torch.float32 [7] on {device}"
    assert text in str(caught.value)
    module.float()
    gradients_of_step(module, 1)
    module.double()
    again = sync.attach(module, Identity())
    module(Mlp.batch(2, dist.get_rank(), torch.float64)).backward()
    again.close()


def test_parameters_that_have_been_converted_are_named():
    values_of(run_ranks(2, converted))
