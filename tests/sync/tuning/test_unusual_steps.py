"""Tuned trainings with unusual steps: they end as without an attachment, or are tuned as others are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.tuning import uniform_candidates
from gckernels.sync.tuning.trials.rules import STEPS
from models import SMALL_BUCKETS, Halves, build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, proposal_of, scripted, train, tuned_handle
from workloads import digest_of

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
TIMES_S = {PLAIN: 1.0, "four": 0.5, "eight": 0.7}


def in_parts() -> tuple[list[str], list[str]]:
    """Digests of the gradients of steps with two backwards each, and the plans."""
    torch.manual_seed(0)
    module, handles, seen, policies = Halves(), [], [], []
    model = DistributedDataParallel(module)
    with scripted(module, SPECS, TIMES_S, handles):
        handles.append(sync.attach(model))
        for step in range(STEPS + 6):
            model.zero_grad()
            for loss in model(torch.ones(2, 5) + step + dist.get_rank()).values():
                loss.backward()
            seen.append(digest_of(each.grad for each in module.parameters()))
            policies.append(policy_of(handles[0]))
    handles[0].close()
    return seen, policies


def test_steps_with_several_backwards_are_tuned():
    first, second = values_of(run_ranks(2, in_parts))
    assert first == second, "gradients differ between ranks"
    assert {*first[1]} == {PLAIN, "four", "eight"} and first[1][-1] == "four"


MODES: dict[str, tuple[str, dict[str, bool]]] = {
    "penalty": ("Mlp", {}),
    "static_graph": ("Partly", {"static_graph": True}),
    "find_unused_parameters": ("Branches", {"find_unused_parameters": True}),
    "gradient_as_bucket_view": ("Mlp", {"gradient_as_bucket_view": True}),
    "no_sync": ("Mlp", {}),
    "scaler": ("Mlp", {}),
    "evaluation": ("Mlp", {}),
    "two forwards": ("Mlp", {}),
    "freezing": ("Branches", {"find_unused_parameters": True}),
    "64 bits": ("Mlp", {}),
    "module": ("Mlp", {}),
    "unused in module": ("Branches", {"find_unused_parameters": True}),
}


class Widened(nn.Module):
    """Its input with 64 bits for each number."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.double()


def tuned(mode: str, steps: int, folder: str) -> Any:
    """The plans and digests of a tuned training, and its decisions. Its figures can be read at any time."""
    name, settings = MODES[mode]
    module, handles, rank, seen = build(name), [], dist.get_rank(), []
    if mode == "64 bits":
        module.layers[4] = nn.Sequential(Widened(), module.layers[4].double())
    in_ddp = "module" not in mode
    model: Any = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **settings) if in_ddp else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**10, enabled=mode == "scaler")
    with scripted(module, SPECS, TIMES_S, handles):
        given = {"grad_scaler": scaler} | ({} if in_ddp else settings)
        handle: Any = sync.attach(model, **given)
        handles.append(handle)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 3 == 0)
            if mode == "freezing" and step in (5, 30):
                module.trunk.requires_grad_(step == 30)
            if mode in ("no_sync", "module"):
                with (model if in_ddp else handle).no_sync():
                    model(module.batch(1000 + step, rank)).backward()
            batch = module.batch(step, rank)
            batch["x"].requires_grad_(mode == "penalty")
            loss = model(batch)
            if mode == "two forwards":
                loss = loss + model(module.batch(1000 + step, rank))
            if mode == "penalty":
                (gradient,) = torch.autograd.grad(loss, batch["x"], create_graph=True)
                loss = loss + gradient.square().sum()
            if mode == "scaler" and step in (5, 23):
                loss = loss * torch.inf  # which the scaler skips
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if mode == "evaluation":
                model(module.batch(step, rank))  # without a backward
                with torch.no_grad():
                    model.eval()(module.batch(step, rank))
                    model.train()
                    if rank == 0:
                        module(module.batch(step, rank))
            assert repr(handle) and handle.stats()["step"] == handle.steps == step + 1
            if step in (0, 4, 12, 25, steps - 1):
                handle.report(f"{folder}/{rank}-{step}.html")
            seen.append((policy_of(handle), digest_of(module.parameters())))
        texts = [each.text for each in handle.decisions]
        handle.close()
    return seen, texts


@pytest.mark.parametrize(
    "mode",
    [
        "penalty",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES if mode != "penalty"),
    ],
)
def test_every_mode_of_training_is_tuned_and_watched(mode, tmp_path):
    first, second = values_of(run_ranks(2, tuned, mode, STEPS + 6, str(tmp_path)))
    assert first == second
    seen, texts = first
    policies = [policy for policy, _ in seen]
    assert {*policies} == {PLAIN, "four", "eight"} and {*policies[STEPS + 3 :]} == {"four"}
    assert len(texts) == 1 and len(list(tmp_path.iterdir())) == 10


def adversaries() -> list[tuple[str, str, int, int, str]]:
    """The plans, steps and digests of two models, which are tuned beside each other. Each step has a backward through
    both."""
    modules = [build("Mlp").layers, nn.Sequential(nn.Linear(7, 23), nn.Tanh(), nn.Linear(23, 1))]

    def candidates(parameters: Any, *_: object) -> Any:
        (module,) = [each for each in modules if len([*each.parameters()]) == len(parameters)]
        return proposal_of(module, {"four": "BlockQuant(bits=4)"})

    with mock.patch.object(uniform_candidates, "candidates", candidates):
        makes, judges = models = [DistributedDataParallel(module) for module in modules]
        handles = [sync.attach(model) for model in models]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in modules]
        generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(STEPS + 10):
            made = makes(torch.randn(8, 23, generator=generator))
            optimizers[1].zero_grad()
            (judges(made.detach()).mean() - judges(torch.randn(8, 7, generator=generator)).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judges(made).mean().neg().backward()
            optimizers[0].step()
            digest = digest_of(each for module in modules for each in module.parameters())
            seen.append((*map(policy_of, handles), *(handle.steps for handle in handles), digest))
        for handle in handles:
            handle.close()
    return seen


@pytest.mark.slow
def test_two_models_are_tuned_beside_each_other():
    first, second = values_of(run_ranks(2, adversaries))
    assert first == second and {policy for makes, judges, *_ in first for policy in (makes, judges)} == {PLAIN, "four"}
    assert first[-1][2:4] == (STEPS + 10, 2 * (STEPS + 10))


def slow_search(front: str) -> tuple[list[str], list[str]]:
    """The plans of a training in which the search for plans takes more steps than there are for all of the tuning."""
    module, handles = build("Mlp"), []
    plans = uniform_candidates.uniform_plans

    def slow(*given: Any) -> Any:
        for _ in range(STEPS + 20):
            yield
        return (yield from plans(*given))

    with (
        scripted(module, SPECS, TIMES_S, handles),
        mock.patch.object(uniform_candidates, "uniform_plans", slow),
    ):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        seen = train(model, module, range(2 * STEPS + 30), lambda _: policy_of(handle))
    texts = [each.text for each in handle.decisions]
    handle.close()
    return seen, texts


@pytest.mark.parametrize("front", ["ddp", pytest.param("module", marks=pytest.mark.slow)])
def test_every_plan_has_a_turn_however_long_the_search_takes(front):
    for seen, texts in values_of(run_ranks(2, slow_search, front)):
        assert {*seen} == {PLAIN, "four", "eight"} and seen[-1] == "four"
        assert len(texts) == 1 and "chosen" in texts[0]


def thawed() -> tuple[list[str], list[str]]:
    """The names in the recorded trace, and digests of the gradients of a layer that is thawed when a plan runs."""
    module, handles, traced, seen = build("Mlp"), [], [], []
    module.layers[0].requires_grad_(False)

    def candidates(parameters: Any, stage: Any, trace: ModelTrace, *_: Any) -> Any:
        traced.extend(tensor.name for tensor in trace.tensors)
        assert sorted(parameters) == sorted(traced)
        return proposal_of([(name, module.get_parameter(name)) for name in traced], SPECS)

    patch = mock.patch.object(uniform_candidates, "candidates", candidates)
    with scripted(module, SPECS, TIMES_S, handles), patch:
        handles.append(sync.attach(module))
        for step in range(50):
            module.layers[0].requires_grad_(is_thawed := policy_of(handles[0]) != PLAIN and step > 45)
            module.zero_grad()
            module(module.batch(step, dist.get_rank())).backward()
            seen += [digest_of(each.grad for each in module.parameters())] if is_thawed else []
    handles[0].close()
    return sorted(traced), seen


def test_frozen_parameters_have_no_part_in_a_search():
    (names, seen), (_, others) = values_of(run_ranks(2, thawed))
    assert names == [f"layers.{layer}.{kind}" for layer in (2, 4) for kind in ("bias", "weight")]
    assert seen == others and len(seen) > 2
