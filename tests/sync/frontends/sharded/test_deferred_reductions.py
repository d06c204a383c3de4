"""Reductions to shards whose results FSDP gets when backward ends: they change nothing, and are awaited wherever FSDP
would read them before."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gckernels import sync
from gckernels.sync.frontends.sharded.sharded_frontend import ShardedFrontend
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, Setting, adamw, digest, fsdp_modules, model_of, split, train

STEPS = 3
CODECS = ("Identity", "BlockQuant(bits=4)", "TopK(ratio=0.1)", "QSGD", "Cast16")


def _halve(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))


def _sum(model: Any) -> None:
    for part in fsdp_modules(model):
        part.set_force_sum_reduction_for_comms(True)


def _double_means(model: Any) -> None:
    for part in fsdp_modules(model):
        part.set_all_reduce_hook(lambda reduced: reduced.mul_(2))


READS = {
    "casts": SETTINGS["bf16"],
    "adds": SETTINGS["every microbatch"],
    "divides": Setting(prepare=_sum),
    "hooks of parameters": Setting(prepare=_halve),
    "hooks of reductions": Setting(prepare=_double_means),
}
EXACT = {"fsdp": "Identity", "one shard": "Signal"}


def trained(form: str, setting: Setting, plan: str | None, defers: bool | None = None) -> tuple[str, int]:
    """The digest of a training, and how many reductions were deferred; all or none of them if ``defers`` says so."""
    model = model_of(setting, form)
    program = None if form == "fsdp" else "allgather"  # the usual one for replicas would leave everything to FSDP
    sent = sync.uniform_plan(model, plan, program=program) if plan == "Identity" else plan
    attachment = None if sent is None else sync.attach(model, sent)
    may_defer, deferred = ShardedFrontend._may_defer, []

    def chosen(self: Any, *arguments: Any) -> bool:
        answer = may_defer(self, *arguments) if defers is None else defers
        deferred.append(answer)
        return answer

    with mock.patch.object(ShardedFrontend, "_may_defer", chosen):
        train(model, setting, range(STEPS), adamw(model))
    found = digest(model)
    if attachment is not None:
        attachment.close()
    return found, sum(deferred)


def awaited_or_not(form: str) -> dict[str, list[tuple[str, int]]]:
    return {spec: [trained(form, SETTINGS["plain"], spec, defers) for defers in (None, False)] for spec in CODECS}


@pytest.mark.host_only("streams of a device wait for results, the host does not")
@pytest.mark.parametrize("form", [pytest.param("fsdp", marks=pytest.mark.slow), "one shard"])
def test_a_deferred_result_is_that_of_an_awaited_one(form):
    for found in values_of(run_ranks(2, awaited_or_not, form)):
        for spec, ((deferred, count), (awaited, none)) in found.items():
            assert deferred == awaited, spec
            steps = STEPS - 1 if form == "fsdp" else STEPS  # FSDP itself reduces gradients of the first step to shards
            assert (count, none) == (3 * steps, 0), spec


def read_before_the_end(form: str) -> dict[str, list[tuple[str, int]]]:
    """By setting: trainings without an attachment, with one, and with one that defers what it must not."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # memory is filled with NaN
    try:
        return {
            name: [
                trained(form, setting, None),
                trained(form, setting, "Identity"),
                trained(form, setting, "Identity", True),
            ]
            for name, setting in READS.items()
        }
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.host_only("streams of a device wait for results, the host does not")
@pytest.mark.parametrize("form", ["fsdp", pytest.param("one shard", marks=pytest.mark.slow)])
def test_what_fsdp_reads_is_awaited(form):
    for found in values_of(run_ranks(2, read_before_the_end, form)):
        for name, ((alone, _), (attached, deferred), (wrong, _)) in found.items():
            assert attached == alone, name
            assert wrong != alone, name
            if name != "adds":  # the first microbatch of a step finds no gradients
                assert deferred == 0, name


class Block(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        hidden = torch.tanh(self.always(inputs))
        return hidden + self.sometimes(inputs) if uses_all else hidden


class Twice(nn.Module):
    """A model that uses a block twice, once with fewer layers. FSDP reduces its gradients twice, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(16, 16), Block()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.block(self.block(self.first(inputs), False), True)
        return hidden


def used_twice(form: str, spec: str | None) -> list[torch.Tensor]:
    """The gradients of a second step, as the first one is averaged exactly."""
    torch.manual_seed(0)
    model: Any = Twice()
    split(model, (model.block, model), form)
    attachment = None if spec is None else sync.attach(model, spec)
    for _ in range(2):
        model.zero_grad()
        for reduces in (False, True):  # the first reduction has what is accumulated of all, the second one a part
            model.set_requires_gradient_sync(reduces)
            model(torch.randn(5, 16)).square().sum().backward()
    gradients = [each.grad.to_local() for each in model.parameters()]
    if attachment is not None:
        attachment.close()
    return gradients


def compared(form: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(used_twice(form, "Cast16"), used_twice(form, None), strict=True))


@pytest.mark.parametrize("form", ["fsdp", "one shard"])
def test_both_results_of_a_group_that_is_reduced_twice_are_kept(form):
    for pairs in values_of(run_ranks(2, compared, form)):
        for compressed, alone in pairs:
            torch.testing.assert_close(compressed, alone, rtol=2**-7, atol=2**-8 * float(alone.abs().max()))
