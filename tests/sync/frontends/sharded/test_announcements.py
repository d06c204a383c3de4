"""Parameters that some ranks use and others do not: an error on all ranks that names them, and torch's cure."""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gckernels import sync
from ranks import run_ranks, values_of
from sharded_models import split

HAS_CURE = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Seeing(nn.Module):
    """A network with layers for batches that have an image, between layers for all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.image, self.second, self.last = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, inputs: torch.Tensor, has_image: bool) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        seen = self.image(inputs)
        return self.last(torch.tanh(self.second(hidden + seen if has_image else hidden)))


def _model(form: str, apart: bool) -> Any:
    """A model with all layers in one group, or each in its own."""
    torch.manual_seed(0)
    model = Seeing()
    layers = (model.first, model.image, model.second, model.last) if apart else ()
    split(model, (*layers, model), form)
    return model


def _step(model: Any, step: int, has_image: bool) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(4, 16, generator=generator), has_image).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each.to_local().sub_(each.grad.to_local(), alpha=0.1)
    model.zero_grad()


def _look_late(frontend: Any) -> None:
    """Let rank 0 look at announcements only when others have ended their connections because of them, and have not
    said why."""
    look, runtime = frontend._announcements.check, frontend.runtime
    if dist.get_rank() > 0:
        runtime._engine.lanes.failure.tell = lambda *_: None
        return

    def check(number: int) -> None:
        until = time.monotonic() + 30.0
        while runtime.problem is None and time.monotonic() < until:
            time.sleep(0.01)
        look(number)

    frontend._announcements.check = check


def differing(form: str, spec: str, first: int, options: dict[str, Any], is_late: bool = False) -> list[str]:
    """The errors of a step in which only rank 0 has an image, and of a reduction behind it."""
    model, errors = _model(form, apart=False), []
    attachment = sync.attach(model, spec, **options)
    for step in range(first):
        _step(model, step, has_image=True)
    if is_late:
        _look_late(attachment._frontend)
    begun = partial(attachment._frontend._begun, 0)
    for attempt in (lambda: _step(model, first, has_image=dist.get_rank() == 0), begun):
        try:
            attempt()
        except RuntimeError as error:
            errors.append(str(error))
    attachment.close()
    return errors


CASES: dict[str, tuple[Any, ...]] = {
    "signs": ("fsdp", "EFSignSGD", 2, {}),
    "first step": ("fsdp", "EFSignSGD", 0, {}),
    "nothing": ("fsdp", "Identity", 3, {}),
    "weights": ("fsdp", "BlockQuant", 2, {"weights": "BlockQuant(bits=4)"}),
    "replicas": ("one shard", "BlockQuant(bits=4)", 2, {}),
    "first step of replicas": ("one shard", "BlockQuant(bits=4)", 0, {}),
    "late": ("one shard", "BlockQuant(bits=4)", 2, {}, True),
}


@pytest.mark.host_only("ranks announce nothing on a device")
@pytest.mark.parametrize(
    "case", [each if each in ("signs", "late") else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_all_ranks_learn_which_parameter_some_do_not_use(case):
    for found in values_of(run_ranks(2, differing, *CASES[case])):
        first, then = found
        assert "parameter image.weight has a gradient on rank 0 and none on rank 1" in first
        assert ("set_reduce_scatter_unused_params(True)" in first) == HAS_CURE
        assert "failed before" in then and "parameter image.weight has a gradient" in then


def agreeing(form: str, spec: str | None) -> list[list[bool]]:
    """By step, which parameters have gradients: layers are used on all ranks or on none, as batches have images."""
    model, found = _model(form, apart=form == "fsdp"), []
    attachment = None if spec is None else sync.attach(model, spec)
    for step, has_image in enumerate((True, False, True, True, False)):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 16, generator=generator), has_image).square().mean().backward()
        found.append([each.grad is not None for each in model.parameters()])
        model.zero_grad()
    if attachment is not None:
        attachment.close()
    return found


def agreeing_in_all_forms() -> list[bool]:
    return [agreeing(form, None) == agreeing(form, "BlockQuant") for form in ("fsdp", "one shard")]


def test_what_no_rank_uses_has_no_gradient():
    assert values_of(run_ranks(2, agreeing_in_all_forms)) == [[True, True]] * 2


def cured(form: str, spec: str | None) -> list[torch.Tensor]:
    """The gradients of a step in which only rank 0 has an image, with torch's cure."""
    model: Any = _model(form, apart=False)
    model.set_reduce_scatter_unused_params(True)
    attachment = None if spec is None else sync.attach(model, spec)
    _step(model, 0, has_image=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(4, 16, generator=generator), dist.get_rank() == 0).square().mean().backward()
    if attachment is not None:
        attachment.close()
    return [each.grad.to_local() for each in model.parameters()]


def cured_or_alone() -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = [(cured(form, None), cured(form, "Identity")) for form in ("fsdp", "one shard")]
    return [all(map(torch.equal, *pair)) for pair in pairs]


@pytest.mark.skipif(not HAS_CURE, reason="this torch has no set_reduce_scatter_unused_params")
def test_with_the_cure_of_torch_gradients_are_those_of_fsdp():
    assert values_of(run_ranks(2, cured_or_alone)) == [[True, True]] * 2
