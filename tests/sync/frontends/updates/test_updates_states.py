"""Trainings whose updates are averaged go on from their states, also inside a round, and on other numbers of ranks."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from gckernels import EFSignSGD, sync
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, summed

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
EVERY = 3


def setup(dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> tuple[nn.Module, Any, sync.Attachment]:
    model = build("Mlp", dtype, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"every": EVERY, "outer": NESTEROV} | more
    return model, optimizer, sync.attach(model, sync.Updates(optimizer, EFSignSGD(), **settings))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    digests = []
    for step in steps:
        optimizer.zero_grad()
        model(model.batch(step, dist.get_rank(), next(model.parameters()).dtype)).backward()
        optimizer.step()
        digests.append(digest_of(model.parameters()))
    return digests


def resumed() -> None:
    for dtype, places in ((torch.float32, (2, 6, 7)), (torch.bfloat16, (7,))):
        for saved_at in places:
            model, optimizer, attachment = setup(dtype)
            expected = trained(model, optimizer, range(saved_at))
            state, own = attachment.state_dict(), copy.deepcopy(optimizer.state_dict())
            assert bool(state["updates"]["parameters"]) == (saved_at % EVERY > 0)
            expected = trained(model, optimizer, range(saved_at, 12))
            attachment.close()
            model, optimizer, attachment = setup(dtype, seed=1)
            attachment.load_state_dict(state)
            optimizer.load_state_dict(own)
            assert trained(model, optimizer, range(saved_at, 12)) == expected, (dtype, saved_at)
            assert attachment.steps == 12 // EVERY
            attachment.close()


def test_resumed_inside_a_round():
    values_of(run_ranks(2, resumed))


def save() -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """The states of all ranks after five steps, the mean of the parameters, and what is unsent of a layer."""
    model, optimizer, attachment = setup(outer=None)
    trained(model, optimizer, range(5))
    states: list[Any] = [None] * dist.get_world_size()
    state = attachment.state_dict()
    dist.all_gather_object(states, state)
    mass = mass_of(attachment)["layers.0.weight"]
    flat = torch.cat([each.detach().double().flatten() for each in model.parameters()])
    attachment.close()
    return states, summed(flat) / len(states), mass


def load(states: list[dict[str, Any]], mean: torch.Tensor, mass: torch.Tensor) -> None:
    model, optimizer, attachment = setup(seed=1, outer=None, decay=1.0)
    attachment.load_state_dict(states[::-1])
    flat = torch.cat([each.detach().double().flatten() for each in model.parameters()]).cpu()
    torch.testing.assert_close(flat, mean, rtol=0, atol=1e-6)
    if dist.get_world_size() > 1:
        torch.testing.assert_close(mass_of(attachment)["layers.0.weight"].cpu(), mass, rtol=0, atol=1e-6)
    digests = trained(model, optimizer, range(5, 9))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    assert len({each[0] for each in everyone}) == 1 and len({each[3] for each in everyone}) == 1
    assert attachment.steps == 3
    attachment.close()


def test_another_number_of_ranks():
    """Every rank goes on with the mean of the parameters, and the mean of the residuals stays as it was."""
    for saved, loads in ((2, 3), (3, 2), (2, 1)):
        found = values_of(run_ranks(saved, save))
        values_of(run_ranks(loads, load, *found[0]))


def damaged() -> None:
    model, optimizer, attachment = setup()
    trained(model, optimizer, range(4))
    state = attachment.state_dict()
    before = digest_of(model.parameters())
    updates = state["updates"]
    anchors = {name: each for name, each in updates["anchors"].items() if name != "layers.0.weight"}
    short = updates["parameters"] | {"layers.0.weight": torch.zeros(3)}
    wrong = {
        "updates must": {"updates": None},
        "updates must be": {"updates": updates | {"taken": -1}},
        "anchors must": {"updates": updates | {"anchors": anchors}},
        "parameters must": {"updates": updates | {"parameters": short}},
        "parameters must have": {"updates": updates | {"parameters": {}}},
        "outer must": {"updates": updates | {"outer": {"param_groups": []}}},
    }
    for text, change in wrong.items():
        _raises(ValueError, text, attachment.load_state_dict, state | change)
    other = copy.deepcopy(state)
    other["updates"]["taken"] = 2
    other["rank"] = 1 - dist.get_rank()
    _raises(ValueError, "not at the same step", attachment.load_state_dict, [state, other])
    assert digest_of(model.parameters()) == before
    attachment.close()
    gradients = sync.attach(model, EFSignSGD())
    model(model.batch(0, 0)).backward()
    model(model.batch(0, 0)).backward()
    _raises(ValueError, "that averages updates, and this one averages gradients", gradients.load_state_dict, state)
    of_gradients = gradients.state_dict()
    gradients.close()
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD()))
    _raises(ValueError, "averages gradients, and this one averages updates", attachment.load_state_dict, of_gradients)
    attachment.close()


def _raises(
    kind: type[Exception] | tuple[type[Exception], ...], text: str, function: Any, *arguments: Any, **named: Any
) -> None:
    try:
        function(*arguments, **named)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def test_damaged_states_change_nothing():
    values_of(run_ranks(2, damaged))


# -------------------------------------------------------------------- torch.distributed.checkpoint


def dcp_saved(folder: str) -> list[str]:
    """Save inside a round, before a fragment has arrived, and return the digests of the steps after it."""
    model, optimizer, attachment = setup(every=4, delay=2)
    trained(model, optimizer, range(5))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, attachment.state_dict())
    dcp.save({"gckernels": attachment.checkpoint()}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(states, f"{folder}/states.pt")
    assert states[0]["updates"]["arriving"]["means"]
    digests = trained(model, optimizer, range(5, 12))
    attachment.close()
    return digests


def dcp_loaded(folder: str) -> list[str]:
    digests = []
    for form in ("dcp", "list"):
        model, optimizer, attachment = setup(seed=1, every=4, delay=2)
        if form == "dcp":
            dcp.load({"gckernels": attachment.checkpoint(reads=folder)}, checkpoint_id=folder)
        else:
            attachment.load_state_dict(torch.load(f"{folder}/states.pt", weights_only=False))
        digests.append(trained(model, optimizer, range(5, 12)))
        attachment.close()
    assert digests[0] == digests[1]
    gradients = sync.attach(build("Mlp"), attachment.plan)
    found = {"gckernels": gradients.checkpoint(reads=folder)}
    _raises((ValueError, RuntimeError), "averages updates", dcp.load, found, checkpoint_id=folder)
    gradients.close()
    return digests[0]


def test_saved_by_dcp(tmp_path: Path):
    """A job of the same size goes on with the same bits, and others as from the list of all states."""
    folder = str(tmp_path)
    expected = values_of(run_ranks(2, dcp_saved, folder))
    assert values_of(run_ranks(2, dcp_loaded, folder)) == expected
    for ranks in (1, 3):
        found = values_of(run_ranks(ranks, dcp_loaded, folder))
        assert len({each[-1] for each in found}) == (1 if ranks == 1 else ranks)  # inside a round
