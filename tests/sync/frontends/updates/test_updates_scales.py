"""Factors of steps follow the noise of gradients, and steps are longer by them."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gckernels import EFSignSGD, sync
from gckernels.sync.frontends.updates.step_scales import StepScales
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of


def group() -> Any:
    return dist.distributed_c10d._get_default_group()


def gradients(noise: float, numel: int, rank: int) -> torch.Tensor:
    """A gradient that is the same on all ranks, and noise that is not, ``fp32 [numel]``."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    return common + noise * torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def measured() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = {name: torch.zeros(numel) for name, numel in (("small", 100), ("large", 40_000), ("one", 1))}
    parameters = {name: nn.Parameter(each) for name, each in values.items()}
    optimizer = torch.optim.AdamW(parameters.values())
    for noise, low, high in ((0.0, 1.0, 1.0 + 1e-6), (1.0, 1.0, math.sqrt(ranks)), (1e3, 1.2, math.sqrt(ranks))):
        scales = StepScales([optimizer], group(), torch.get_default_device())
        for round_ in range(30):
            scales.measure(
                {name: gradients(noise, each.numel(), rank + ranks * round_) for name, each in values.items()}, values
            )
            scales.end_measuring()
        found = scales.factor("large")
        assert low - 1e-6 <= found <= high + 1e-9, (noise, found)
        if noise == 1.0:  # (1 + 1) / (1 + 1 / ranks), as the noise of the mean is a part of that of a rank
            assert abs(found - math.sqrt(2 / (1 + 1 / ranks))) < 0.3
        assert scales.factor("one") == 1.0 and 1.0 <= scales.factor("small") <= math.sqrt(ranks)
        assert scales.factor("unknown") == 1.0
    state: list[Any] = [None] * ranks
    dist.all_gather_object(state, scales.state_dict())
    assert all(each == state[0] for each in state)
    scales.measure({"small": torch.full((100,), torch.inf)} if rank else {}, values)
    scales.end_measuring()
    assert 1.0 <= scales.factor("small") <= math.sqrt(ranks)


def longer() -> None:
    """A step is longer by the factor, its weight decay is not; parameters without gradient stay."""
    start = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for kind, decay in ((torch.optim.AdamW, 0.5), (torch.optim.Adam, 0.0), (torch.optim.Muon, 0.5)):
        one, other, idle = (nn.Parameter(start.clone()) for _ in range(3))
        optimizer, plain = (kind([each], lr=0.1, weight_decay=decay) for each in (one, other))
        optimizer.add_param_group({"params": [idle]})
        scales = StepScales([optimizer], group(), torch.get_default_device())
        scales.load({"one": (2.25, 1.0), "idle": (2.25, 1.0)})
        one.grad = other.grad = torch.ones(8, 8)
        parameters = {"one": one, "idle": idle}
        values = {name: each.detach() for name, each in parameters.items()}
        scales.before_step(optimizer, parameters, values)
        optimizer.step()
        scales.after_step(parameters, values)
        plain.step()
        factor = min(1.5, math.sqrt(dist.get_world_size()))
        kept = 1 - 0.1 * decay
        expected = start * kept + factor * (other.detach() - start * kept)
        torch.testing.assert_close(one.detach(), expected)
        assert torch.equal(idle.detach(), start)
        before = one.detach().clone()
        scales.after_step(parameters, values)  # a gradient scaler has skipped the step
        assert torch.equal(one.detach(), before)


class FusedSGD(torch.optim.SGD):
    """SGD of another package."""


def chosen() -> None:
    """Steps get factors by default in front of every optimizer but those of SGD's class, exact updates included."""
    model = build("Mlp")
    parameters = [*model.parameters()]
    adamw, sgd = torch.optim.AdamW(parameters), torch.optim.SGD(parameters, lr=0.1)
    muon = torch.optim.Muon([each for each in parameters if each.dim() == 2])
    others = [kind(parameters, lr=0.1) for kind in (torch.optim.RMSprop, torch.optim.Adagrad)]
    outer = torch.optim.SGD
    for optimizer, spec, settings, expected in (
        (adamw, EFSignSGD(), {"every": 2}, True),
        (adamw, EFSignSGD(), {"every": 4}, True),
        (adamw, EFSignSGD(), {"every": 5}, False),
        (adamw, EFSignSGD(), {"every": {0: 2, 4: 30}}, True),
        (adamw, EFSignSGD(), {"every": 5, "scale_steps": True}, True),
        (adamw, EFSignSGD(), {"scale_steps": False}, False),
        (adamw, EFSignSGD(), {"outer": outer}, False),
        (adamw, "Identity", {}, True),
        (muon, EFSignSGD(), {"every": 2}, True),
        (muon, "Identity", {"every": 4}, True),
        *((other, EFSignSGD(), {}, True) for other in others),
        (sgd, EFSignSGD(), {}, False),
        (FusedSGD(parameters, lr=0.1), "Identity", {}, False),
        (sgd, EFSignSGD(), {"scale_steps": True}, True),
    ):
        attachment = sync.attach(model, sync.Updates(optimizer, spec, **settings))
        assert (attachment._frontend._scales is not None) == expected, (type(optimizer), settings)
        attachment.close()


def several() -> None:
    """Optimizers that need factors get them, though each clears its gradients before the other one steps."""
    model = build("Mlp")
    parameters = dict(model.named_parameters())
    halves = [
        [each for name, each in parameters.items() if name.endswith("weight") is is_first] for is_first in (True, False)
    ]
    for kinds in ((torch.optim.AdamW, torch.optim.AdamW), (torch.optim.AdamW, torch.optim.SGD)):
        optimizers = [kind(half, lr=1e-3) for kind, half in zip(kinds, halves, strict=True)]
        attachment = sync.attach(model, sync.Updates(optimizers, EFSignSGD(), every=2))
        for step in range(6):
            model(model.batch(step, dist.get_rank())).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        scales = attachment._frontend._scales
        assert all(scales.factor(name) > 1 for name in ("layers.0.weight", "layers.0.bias"))
        for number, optimizer in enumerate(optimizers):
            model(model.batch(6, dist.get_rank())).backward()
            scales._factors = {}
            scales.before_step(optimizer, parameters, {name: each.detach() for name, each in parameters.items()})
            own = {id(each) for each in halves[number]}
            found = {name for name in scales._factors if id(parameters[name]) in own}
            assert found == scales._factors.keys() and bool(found) == (kinds[number] is torch.optim.AdamW)
            scales._begins = {}
        attachment.close()


def short_means() -> None:
    """The mean of Muon's steps on different gradients is shorter than one step. Factors make up for it by default, also
    where updates are exact and rounds have four steps."""
    moved = {}
    for scale_steps in (False, None):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.01, weight_decay=0.0, momentum=0.0, nesterov=False)
        attachment = sync.attach(model, sync.Updates(optimizer, "Identity", every=4, scale_steps=scale_steps))
        begin = model.weight.detach().clone()
        for step in range(40):
            noise = torch.Generator().manual_seed(dist.get_rank() + 2 * step)
            model.weight.grad = torch.randn(64, 64, generator=noise)
            optimizer.step()
            if step == 35:
                begin = model.weight.detach().clone()
        moved[scale_steps] = float((model.weight.detach() - begin).norm())
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest_of(model.parameters()))
        assert len({*digests}) == 1
        attachment.close()
    # gradients of noise alone: the mean of two steps is shorter by the root of two
    assert 1.3 < moved[None] / moved[False] < 1.5, moved


def resumed() -> None:
    digests: list[list[str]] = []
    state: Any = None
    for begin in (0, 7):
        model = build("Mlp", seed=begin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))
        if state is not None:
            attachment.load_state_dict(state)
        digests.append([])
        for step in range(begin, 14):
            if step == 7 and state is None:
                state = copy.deepcopy(attachment.state_dict())
            optimizer.zero_grad()
            model(model.batch(step, dist.get_rank())).backward()
            optimizer.step()
            digests[-1].append(digest_of(model.parameters()))
        factors = [attachment._frontend._scales.factor(name) for name in attachment.parameters()]
        assert max(factors) > 1.0
        attachment.close()
    assert digests[0][7:] == digests[1]


def every_part() -> None:
    measured()
    longer()
    if dist.get_world_size() == 2:
        chosen()
        several()
        short_means()
        resumed()


def test_factors():
    for ranks in (2, 3):
        values_of(run_ranks(ranks, every_part))


def in_closures() -> None:
    """Steps whose closure clears gradients and runs backward have the factors of those behind a backward."""
    found = []
    for has_closure in (False, True):
        model = build("Mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))

        def backward(step: int, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(model.batch(step, dist.get_rank()))
            loss.backward()
            return loss

        for step in range(7):
            if has_closure:
                optimizer.zero_grad()
                optimizer.step(functools.partial(backward, step))
            else:
                backward(step)
                optimizer.step()
        assert any(attachment._frontend._scales.factor(name) > 1 for name in attachment.parameters())
        found.append(digest_of(model.parameters()))
        attachment.close()
    assert found[0] == found[1]


def test_steps_with_a_closure():
    values_of(run_ranks(2, in_closures))
