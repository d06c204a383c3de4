"""Parameters that are frozen inside a round are the same on all ranks after it, as with plain local SGD."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gckernels import sync
from ranks import run_ranks, values_of

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def differing(model: nn.Module) -> set[str]:
    """The names of parameters that differ between ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: each.detach() for name, each in model.named_parameters()})
    return {name for name, each in found[0].items() if not torch.equal(each, found[-1][name])}


def frozen(whens: list[str], settings: dict[str, Any]) -> None:
    for when in whens:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        attachment = sync.attach(model, sync.Updates(optimizer, "Identity", **settings))
        generator = torch.Generator().manual_seed(dist.get_rank())
        every, moves = settings["every"], []
        for step in range(1, 5 * every + 1):
            before = model[0].weight.detach().clone()
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            if when == "after backward" and step == every + 2:
                model[0].requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=when != "with gradients")
            if when != "after backward" and step == every + 2:
                model[0].requires_grad_(False)
            moves.append(bool((model[0].weight != before).any()))
        assert when == "with gradients" or not any(moves[3 * every :])
        if not settings.keys() & {"delay", "fragments"}:
            assert not differing(model), (when, settings)
        assert when == "with gradients" or differing(model) <= {"2.weight", "2.bias"}, (when, settings)
        own = [each.detach().clone() for each in model.parameters()]
        attachment.load_state_dict(attachment.state_dict())
        assert all(torch.equal(one, other) for one, other in zip(own, model.parameters(), strict=True))
        assert attachment._frontend._moved == {"2.weight", "2.bias", "0.weight", "0.bias"}
        attachment.close()


WHENS = ["after step", "after backward", "with gradients"]
SETTINGS: list[dict[str, Any]] = [
    {"every": 4},
    {"every": 4, "fragments": 2},
    {"every": 4, "delay": 2},
    {"every": 4, "delay": 2, "mixing": 0.5},
    {"every": 3, "outer": NESTEROV},
]


def kinds() -> None:
    frozen(WHENS, SETTINGS[0])
    frozen(WHENS[:1], SETTINGS[3])


def all_kinds() -> None:
    for settings in SETTINGS[1:]:
        frozen(WHENS, settings)


def test_frozen_inside_a_round():
    values_of(run_ranks(2, kinds))


@pytest.mark.slow
def test_frozen_inside_all_kinds_of_rounds():
    values_of(run_ranks(2, all_kinds))
